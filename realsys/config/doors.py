"""Table of doors: the parts that a user may replace, their built-in names and their contracts.

    config value ──built-in name──> "module:attribute" of realsys ──import──> object
                 └─"package.module:attribute" of the user ─────────import──> object, checked against the contract

This table is the only list of names. It holds strings, so reading it imports nothing: the launcher checks a built-in
name without torch, and imports only what the user has named. A check raises ConfigError, which ends the launcher with
one line and exit code 2.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from realsys.agent_runner.contract import argument_problem, kind_of
from realsys.errors import ConfigError, RealsysError

#: Takes a loaded object and returns the problem with it; "" if it satisfies the contract.
Contract = Callable[[Any], str]


@dataclass(frozen=True, slots=True)
class Door:
    """One replaceable part.

    field     configuration field that names the part
    kind      word for such a part in messages
    builtin   built-in name -> "module:attribute"
    contract  check of a loaded object
    settings  built-in name -> "module:function" that checks the part's arguments, against the configuration and this
              machine: ``function(arguments, config)`` returns the problem, or None
    arguments  configuration field of the part's arguments; "": ``field`` with ``_args``
    """

    field: str
    kind: str
    builtin: Mapping[str, str]
    contract: Contract
    settings: Mapping[str, str] = dataclasses.field(default_factory=dict)
    arguments: str = ""

    def at(self, field: str) -> Door:
        """Return this door for another field of the configuration, which errors then name."""
        return dataclasses.replace(self, field=field)

    @property
    def arguments_field(self) -> str:
        """Configuration field that errors about arguments name."""
        return self.arguments or f"{self.field}_args"

    def check(self, value: str, arguments: Mapping[str, Any] | None = None) -> None:
        """Check a name before anything starts. Import strings are imported; built-in names only to check arguments.

        ``arguments``: the keyword arguments that the configuration gives to the part, checked against its signature.
        Raises ConfigError.
        """
        if value in self.builtin and not arguments:
            return
        loaded = self.load(value)
        if arguments is not None:
            self._check_arguments(value, loaded, arguments)

    def check_settings(self, value: str, arguments: Mapping[str, Any], config: Any) -> None:
        """Check that a built-in part can work as it is configured, on this machine. Raises ConfigError."""
        if value not in self.settings:
            return
        module, _, attribute = self.settings[value].partition(":")
        if problem := getattr(importlib.import_module(module), attribute)(arguments, config):
            raise ConfigError(self.arguments_field, dict(arguments), problem)

    def load(self, value: str) -> Any:
        """Import the object that ``value`` names, and check it against the contract. Raises ConfigError."""
        path = self.builtin.get(value, value)
        module, colon, attribute = path.rpartition(":") if ".py:" in path else path.partition(":")
        if not (module and colon and attribute):
            known = ", ".join(sorted(self.builtin))
            raise ConfigError(self.field, value, f"unknown {self.kind}: use one of {known}, or package.module:name")
        loaded = self._import(value, module, attribute)
        if problem := self.contract(loaded):
            article = "an" if self.kind[0] in "aeiou" else "a"
            raise ConfigError(self.field, value, f"is not {article} {self.kind}: {problem}")
        return loaded

    def make(self, value: str, first: Any, arguments: Mapping[str, Any]) -> Any:
        """Import the class or function that ``value`` names and call it with ``first`` and ``arguments``.

        Raises ConfigError, also for what the user's code raises.
        """
        loaded = self.load(value)
        self._check_arguments(value, loaded, arguments)
        with self.guard(value, "cannot be built"):
            return loaded(first, **arguments)

    @contextlib.contextmanager
    def guard(self, value: str, problem: str) -> Iterator[None]:
        """Turn any exception of the body, which may run code of the user, into a ConfigError of one line."""
        try:
            yield
        except RealsysError:
            raise
        except (Exception, SystemExit) as error:
            raised = " ".join(f"{type(error).__name__}: {error}".split())[:500]
            raise ConfigError(self.field, value, f"{problem}: {raised}") from error

    def _import(self, value: str, module: str, attribute: str) -> Any:
        with self.guard(value, "cannot be imported"):
            try:
                loaded: Any = _import_file(module) if module.endswith(".py") else importlib.import_module(module)
            except ModuleNotFoundError as error:
                if error.name and (module == error.name or module.startswith(f"{error.name}.")):
                    problem = f"no module named {error.name!r}: set PYTHONPATH to the folder that contains it"
                    raise ConfigError(self.field, value, problem) from None
                raise
            for name in attribute.split("."):
                if not hasattr(loaded, name):
                    raise ConfigError(self.field, value, f"module {module} has no attribute {attribute!r}")
                loaded = getattr(loaded, name)
            return loaded

    def _check_arguments(self, value: str, loaded: Any, arguments: Mapping[str, Any]) -> None:
        try:
            inspect.signature(loaded).bind(None, **arguments)
        except (TypeError, ValueError) as error:
            raise ConfigError(self.arguments_field, dict(arguments), f"do not fit {value}: {error}") from None


def _import_file(path: str) -> Any:
    """Import a file by its path, once per process. Raises OSError, and what its code raises."""
    if path not in sys.modules:
        spec = importlib.util.spec_from_file_location(path, path)
        if spec is None or spec.loader is None:
            raise FileNotFoundError(f"{path} cannot be loaded")
        sys.modules[path] = importlib.util.module_from_spec(spec)  # before it runs: dataclasses look their module up
        try:
            spec.loader.exec_module(sys.modules[path])
        except BaseException:
            del sys.modules[path]
            raise
    return sys.modules[path]


def takes(*names: str) -> Contract:
    """Contract of a callable: it takes these positional arguments."""

    def problem(loaded: Any) -> str:
        if not callable(loaded):
            return f"it must be a function ({', '.join(names)}), not {type(loaded).__name__}"
        try:
            signature = inspect.signature(loaded)
        except (TypeError, ValueError):  # a callable without a signature cannot be checked
            return ""
        try:
            signature.bind(*names)
        except TypeError:
            positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
            fit = [p for p in signature.parameters.values() if p.kind in positional]
            if len(fit) != len(names) and not any(p.kind is p.VAR_POSITIONAL for p in signature.parameters.values()):
                return f"it must take ({', '.join(names)}), it takes {signature}"
        return ""

    return problem


def builds(*methods: str) -> Contract:
    """Contract of a class, or a function that makes objects: the objects have ``methods``."""

    def problem(loaded: Any) -> str:
        if not callable(loaded):
            return f"it must be a class, not {type(loaded).__name__}"
        missing = [name for name in methods if not callable(getattr(loaded, name, None))]
        if inspect.isclass(loaded) and missing:
            return f"the class lacks {', '.join(missing)}"
        return ""

    return problem


def has(*functions: str) -> Contract:
    """Contract of a class or module with these functions."""

    def problem(loaded: Any) -> str:
        missing = [name for name in functions if not callable(getattr(loaded, name, None))]
        return f"it lacks {', '.join(missing)}" if missing else ""

    return problem


def accepts(first: str) -> Contract:
    """Contract of a function with one positional argument; the configuration gives keyword arguments."""

    def problem(loaded: Any) -> str:
        if not callable(loaded) or inspect.isclass(loaded):
            return f"it must be a function ({first}, **arguments), not {type(loaded).__name__}"
        try:
            parameters = list(inspect.signature(loaded).parameters.values())
        except (TypeError, ValueError):  # a callable without a signature cannot be checked
            return ""
        positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        if not parameters or parameters[0].kind not in (*positional, inspect.Parameter.VAR_POSITIONAL):
            return f"it must take ({first}) first, it takes {inspect.signature(loaded)}"
        return ""

    return problem


def handles(method: str, *names: str) -> Contract:
    """Contract of a class without constructor arguments whose ``method`` takes ``names``."""

    def problem(loaded: Any) -> str:
        signature = f"{method}({', '.join(names)})"
        if not inspect.isclass(loaded):
            return f"it must be a class with {signature}, not {type(loaded).__name__}"
        if missing := builds(method)(loaded):
            return missing
        if arguments := takes()(loaded):
            return f"its constructor: {arguments}"
        return takes("self", *names)(inspect.getattr_static(loaded, method))

    return problem


def derives(base: str) -> Contract:
    """Contract of a class: it derives from ``base`` ("module:Class") and overrides its abstract methods.

    Compares the base by name, so that this module does not import it.
    """

    def problem(loaded: Any) -> str:
        if not inspect.isclass(loaded):
            return f"it must be a class, not {type(loaded).__name__}"
        if base not in {f"{parent.__module__}:{parent.__qualname__}" for parent in loaded.__mro__}:
            return f"it must derive from {base.replace(':', '.')}"
        missing = sorted(getattr(loaded, "__abstractmethods__", ()))
        return f"the class lacks {', '.join(missing)}" if missing else ""

    return problem


class AgentDoor(Door):
    """The door of agents, which have two contracts (``realsys.agent_runner.contract``)."""

    def _check_arguments(self, value: str, loaded: Any, arguments: Mapping[str, Any]) -> None:
        if problem := argument_problem(loaded, kind_of(loaded)[0], dict(arguments)):
            raise ConfigError(self.arguments_field, dict(arguments), f"do not fit {value}: {problem}")


AGENT = AgentDoor(
    "rollout.agent",
    "agent",
    {
        "single_turn": "realsys.rollout.agents.single_turn:SingleTurn",
        "multi_turn": "realsys.rollout.agents.multi_turn:MultiTurn",
        "distill": "realsys.rollout.agents.distill:Distill",
        "tool_use": "realsys.rollout.agents.tool_use:ToolUse",
        "verifiers": "realsys.rollout.agents.verifiers:VerifiersAgent",
    },
    lambda loaded: kind_of(loaded)[1],
)

#: classes without constructor arguments
TOOL = Door(
    "rollout.agent_args.tools",
    "tool",
    {
        "calculator": "realsys.rollout.agents.tool_use:Calculator",
        "python": "realsys.rollout.agents.tool_use:Python",
    },
    builds("call", "close"),
)

#: methods of an environment with steps, which has no ``judge``; all are async
STEPS = ("reset", "step", "close")


def has_steps(environment: Any) -> bool:
    """Return True if an environment, or its class, has STEPS in place of ``judge``."""
    methods = [callable(getattr(environment, name, None)) for name in ("judge", *STEPS)]
    return methods == [False, True, True, True]


def _environment(loaded: Any) -> str:
    """Contract of a class with ``judge`` or STEPS, or of a function that makes objects with ``judge``."""
    if not inspect.isclass(loaded) or not builds("judge")(loaded):
        return builds()(loaded)
    missing = [name for name in STEPS if not callable(getattr(loaded, name, None))]
    if missing:
        return f"the class lacks {'judge, or ' * (len(missing) == len(STEPS))}{', '.join(missing)}"
    blocking = [name for name in STEPS if not inspect.iscoroutinefunction(getattr(loaded, name))]
    return f"{', '.join(blocking)} must be async" if blocking else ""


ENVIRONMENT = Door(
    "rollout.environment",
    "environment",
    {"verifier": "realsys.rollout.environments:VerifierEnvironment"},
    _environment,
)

#: decides about a finished group; it may be async
FILTER = Door(
    "train.ppo.filter.accept",
    "filter",
    {"any": "realsys.rollout.episodes:any_group", "unequal_rewards": "realsys.rollout.episodes:unequal_rewards"},
    takes("episodes"),
)

#: verifiers that wait for a service: classes on the event loop of the caller, in place of a verifier process
JUDGE = Door("data.verifier", "verifier", {"judge": "realsys.reward.llm_judge:LlmJudge"}, builds("verify"))

VERIFIER = Door(
    "data.verifier",
    "verifier",
    {
        "code": "realsys.reward.verifiers.code:code",
        "exact": "realsys.reward.verifiers.exact:exact",
        "math": "realsys.reward.verifiers.math:math",
        "reasoning_gym": "realsys.reward.verifiers.reasoning_gym:reasoning_gym",
        **JUDGE.builtin,
    },
    takes("item"),
    {"code": "realsys.reward.verifiers.code:check_settings"},
)

#: reads one row of a data set; ``auto`` (realsys.data.layouts) finds the layout by the keys of the first row
LAYOUT = Door(
    "data.layout",
    "layout",
    {
        "realsys": "realsys.data.layouts:realsys",
        "verl": "realsys.data.layouts:verl",
        "dapo": "realsys.data.layouts:verl",
        "slime": "realsys.data.layouts:slime",
        "messages": "realsys.data.layouts:messages",
        "gsm8k": "realsys.data.layouts:gsm8k",
        "math": "realsys.data.layouts:competition_math",
        "deepscaler": "realsys.data.layouts:problem_answer",
        "humaneval": "realsys.data.layouts:humaneval",
        "mbpp": "realsys.data.layouts:mbpp",
        "code_contests": "realsys.data.layouts:code_contests",
        "livecodebench": "realsys.data.layouts:livecodebench",
    },
    accepts("row"),
)

LOSS = Door(
    "train.ppo.loss",
    "loss",
    {
        "ppo": "realsys.algorithm.losses.ppo:ppo",
        "gspo": "realsys.algorithm.losses.gspo:gspo",
        "cispo": "realsys.algorithm.losses.cispo:cispo",
        "reinforce": "realsys.algorithm.losses.reinforce:reinforce",
        "distill": "realsys.algorithm.losses.distill:distill",
    },
    accepts("inputs"),
)

ALGORITHM = Door(
    "train.ppo.algorithm",
    "algorithm",
    {
        "ppo": "realsys.algorithm.dataflows:ppo",
        "sft": "realsys.algorithm.dataflows:sft",
        "dpo": "realsys.algorithm.dataflows:dpo",
        "reward_model": "realsys.algorithm.dataflows:reward_model",
        "serve": "realsys.algorithm.dataflows:serve",
    },
    takes("config"),
)

#: function (session) that trains: ``realsys.loops``. ``session`` waits for a script outside of the MasterWorker,
#: ``serve`` for clients of `realsys serve`, and ``evaluate`` is what `realsys eval` runs in its place
LOOP = Door(
    "train.loop",
    "training loop",
    {
        "train": "realsys.loops:train",
        "session": "realsys.train.master.script_service:serve",
        "serve": "realsys.train.master.serving:serve",
        "evaluate": "realsys.train.master.request_evaluations:EvaluationRun",
    },
    takes("session"),
)

#: ``FunctionCall.handler``
CALL_HANDLER = Door(
    "dataflow",
    "call handler",
    {
        "actor_inf": "realsys.train.worker.actor:ActorInference",
        "ref_inf": "realsys.train.worker.actor:ReferenceInference",
        "critic_inf": "realsys.train.worker.actor:CriticInference",
        "reward_inf": "realsys.train.worker.actor:RewardInference",
        "advantages": "realsys.train.worker.advantages:Advantages",
        "actor_train": "realsys.train.worker.actor:ActorTrain",
        "critic_train": "realsys.train.worker.critic:CriticTrain",
        "sft": "realsys.train.worker.supervised:Sft",
        "dpo": "realsys.train.worker.supervised:Dpo",
        "reward_model": "realsys.train.worker.supervised:RewardModel",
        "tenant_loss": "realsys.train.worker.tenants:TenantLoss",
    },
    handles("run", "role", "request"),
)

#: ``FunctionCall.pre_hooks`` and ``post_hooks``
HOOK = Door(
    "dataflow",
    "hook",
    {"onload": "realsys.train.worker.call_handlers:onload", "offload": "realsys.train.worker.call_handlers:offload"},
    takes("role", "request"),
)

TRANSPORT = Door(
    "weights.transport",
    "weight transport",
    {
        "disk": "realsys.weights.disk.transport:DiskTransport",
        "memory": "realsys.weights.memory:MemoryTransport",
        "group": "realsys.weights.group:GroupTransport",
    },
    builds("writer", "publisher", "reader"),
)

BACKEND = Door(
    "generation.backend",
    "generation backend",
    {
        "embedded": "realsys.generation.embedded.backend:EmbeddedBackend",
        "sglang": "realsys.generation.sglang.backend:SglangBackend",
        "vllm": "realsys.generation.vllm.backend:VllmBackend",
    },
    derives("realsys.generation.backend:Backend"),
)

#: starts a node agent on every machine of a trial with ``cluster.nodes``
LAUNCHER = Door(
    "cluster.launcher",
    "launcher",
    {
        "local": "realsys.launch.launchers.local:LocalLauncher",
        "ray": "realsys.launch.launchers.ray_launcher:RayLauncher",
        "slurm": "realsys.launch.slurm.launcher:SlurmLauncher",
    },
    derives("realsys.launch.launchers.contract:Launcher"),
)

#: receives the metrics of the step log, in another process than the launcher (realsys.observe.trackers)
TRACKER = Door(
    "telemetry.trackers",
    "tracker",
    {
        "file": "realsys.observe.trackers.file:FileTracker",
        "mlflow": "realsys.observe.trackers.mlflow:MlflowTracker",
        "tensorboard": "realsys.observe.trackers.tensorboard:TensorBoardTracker",
        "trackio": "realsys.observe.trackers.trackio:TrackioTracker",
        "wandb": "realsys.observe.trackers.wandb:WandbTracker",
    },
    derives("realsys.observe.trackers.contract:Tracker"),
    arguments="telemetry.tracker_args",
)
