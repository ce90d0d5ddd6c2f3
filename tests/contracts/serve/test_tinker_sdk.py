"""The SDK of Tinker, unmodified, over HTTP against the service, whose ranks and servers are numpy."""

import asyncio
import gc
import threading
from concurrent.futures import ThreadPoolExecutor

import msgspec
import numpy as np
import pytest

from realsys.errors import ConfigError
from realsys.serve.journal import audit
from realsys.serve.routes import serve
from realsys.serve.service import Service
from realsys.serve.settings import Owner
from tests.support.needs import need_package
from tests.support.serve.numpy_ranks import NumpySampler, NumpyTrainer, log_softmax
from tests.support.serve.tinker_calls import SETTINGS

# The SDK leaves connections open when its client is closed.
pytestmark = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning", "ignore::RuntimeWarning"
)

OWNERS = (Owner("tml-a", name="a", tokens_per_call=24), Owner("tml-b", name="b"))


class Server:
    """A service in a thread of its own, with its event loop."""

    def __init__(self, folder, settings, port=0):
        self.folder, self.settings = folder, settings
        self.url, self.error = "", None
        self._ready, self._port = threading.Event(), port
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self):
        try:
            asyncio.run(self._serve())
        except Exception as error:
            self.error = error
        self._ready.set()

    async def _serve(self):
        self._loop = asyncio.get_running_loop()
        self.ranks = NumpyTrainer(self.folder / "snapshots")
        self.service = Service(self.ranks, NumpySampler(), self.settings, self.folder / "service")
        await self.service.open()
        await serve(self.service, "127.0.0.1", self._port, on_ready=self._on_ready)
        self.service.close()

    def _on_ready(self, url):
        self.url = url
        self._ready.set()

    def __enter__(self):
        self._thread.start()
        assert self._ready.wait(60) and self.error is None, self.error
        return self

    def __exit__(self, *_):
        self._loop.call_soon_threadsafe(self.service.stop)
        self._thread.join(30)
        assert not self._thread.is_alive() and self.error is None, self.error


@pytest.fixture(scope="module")
def tinker():
    """The package, whose event loop and its one helper thread outlive every test."""
    need_package("tinker")
    import tinker
    from tinker.lib.internal_client_holder import _internal_client_holder_thread_singleton

    loop = _internal_client_holder_thread_singleton.get_loop()
    loop.call_soon_threadsafe(loop.set_default_executor, ThreadPoolExecutor(1))
    asyncio.run_coroutine_threadsafe(asyncio.to_thread(int), loop).result(30)
    return tinker


@pytest.fixture(autouse=True)
def collected():
    """The connections are blamed on these tests, not on later ones."""
    yield
    gc.collect()


def datum(tinker, tokens, **arrays):
    """A datum whose targets are the next tokens."""
    arrays = arrays or {"weights": np.ones(len(tokens) - 1, np.float32)}
    inputs = {"target_tokens": np.array(tokens[1:]), **arrays}
    return tinker.types.Datum(model_input=tinker.types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


def test_sdk_trains_samples_saves_and_loads(tinker, tmp_path):
    rows = [[1 + (i + j) % 9 for j in range(6)] for i in range(10)]
    with Server(tmp_path, msgspec.structs.replace(SETTINGS, owners=OWNERS)) as server:
        client = tinker.ServiceClient(base_url=server.url, api_key="tml-a")
        training = client.create_lora_training_client("tiny", rank=4, seed=3).result(60)
        start = server.ranks.models[training.model_id.replace(":", "-")].weight.copy()

        passed = training.forward_backward([datum(tinker, row) for row in rows], "cross_entropy")
        stepped = training.optim_step(tinker.types.AdamParams(learning_rate=0.1))
        output = passed.result(60)
        assert stepped.result(60).metrics["grad_norm:mean"] > 0
        assert sum(method == "forward_backward" for _, method in server.ranks.calls) > 1  # it was sent in chunks
        for row, each in zip(rows, output.loss_fn_outputs, strict=True):
            expected = log_softmax(start[row[:-1]])[np.arange(5), row[1:]]
            np.testing.assert_allclose(each["logprobs"].data, expected, rtol=1e-6)
        loss = -sum(sum(each["logprobs"].data) for each in output.loss_fn_outputs)
        assert output.metrics["loss:sum"] == pytest.approx(loss, rel=1e-5)

        sampler = training.save_weights_and_get_sampling_client().result(60)
        params = tinker.types.SamplingParams(max_tokens=4)
        prompt = tinker.types.ModelInput.from_ints([1, 2])
        sampled = sampler.sample(prompt, 2, params, topk_sample_logprobs=1).result(60)
        assert [len(each.tokens) for each in sampled.sequences] == [4, 4]
        assert sampled.sequences[0].stop_reason == "length"
        assert sampled.sequences[0].topk_logprobs[0][0][0] == sampled.sequences[0].tokens[0]
        assert len({each.sequence_id for each in sampled.sequences}) == 2

        state = training.save_state("first").result(60).path
        named = training.save_weights_for_sampler("first").result(60).path
        bits = server.ranks.models[training.model_id.replace(":", "-")].bits()
        training.forward_backward([datum(tinker, rows[0])], "cross_entropy").result(60)
        training.optim_step(tinker.types.AdamParams()).result(60)
        other = client.create_training_client_from_state_with_optimizer(state).result(60)
        assert server.ranks.models[other.model_id.replace(":", "-")].bits() == bits
        fresh = client.create_training_client_from_state(state).result(60)
        assert server.ranks.models[fresh.model_id.replace(":", "-")].steps == 0
        training.load_state_with_optimizer(state).result(60)
        assert server.ranks.models[training.model_id.replace(":", "-")].bits() == bits
        again = client.create_sampling_client(model_path=named).result(60)
        assert again.sample(prompt, 1, params).result(60).sequences[0].tokens == sampled.sequences[0].tokens

        rest = tinker.RestClient(base_url=server.url, api_key="tml-a")
        listed = rest.list_checkpoints(training.model_id).result(60).checkpoints
        assert {each.tinker_path for each in listed} == {state, named}
        assert rest.get_training_run_by_tinker_path(state).result(60).lora_rank == 4
        rest.delete_checkpoint_from_tinker_path(state).result(60)
        assert len(rest.list_checkpoints(training.model_id).result(60).checkpoints) == 1
        client.close("success").result(60)
    assert audit(tmp_path / "service") == []


def test_sdk_shows_what_is_wrong(tinker, tmp_path):
    with Server(tmp_path, msgspec.structs.replace(SETTINGS, owners=OWNERS)) as server:
        with pytest.raises(tinker.AuthenticationError):
            tinker.ServiceClient(base_url=server.url, api_key="tml-c").create_lora_training_client("tiny")
        client = tinker.ServiceClient(base_url=server.url, api_key="tml-b")
        with pytest.raises(tinker.BadRequestError, match="rank must be 4"):
            client.create_lora_training_client("tiny", rank=5).result(60)
        training = client.create_lora_training_client("tiny", rank=4).result(60)
        good = training.forward_backward([datum(tinker, [1, 2, 3])], "cross_entropy")
        for row, loss, why in (
            (datum(tinker, [1, 2, 99]), "cross_entropy", "datum 0: .*0 to 10"),
            (datum(tinker, [1, 2, 3]), "ppo", "weights: ppo does not use it"),
            (datum(tinker, [1, 2, 3]), "stable_reinforce", "not computed here"),
            (datum(tinker, [1, 2, 3], weights=np.array([np.nan, 1], np.float32)), "cross_entropy", "finite"),
        ):
            with pytest.raises(tinker.RequestFailedError, match=why) as failed:
                training.forward_backward([row], loss).result(60)
            assert failed.value.category == "user"
        for loss, settings, why in (
            ("dro", {"clip_low_threshold": 0.5}, "dro has no setting"),
            ("ppo", {"beta": 1}, "it has clip"),
        ):
            with pytest.raises(tinker.RequestFailedError, match=why):
                training.forward_backward([datum(tinker, [1, 2, 3])], loss, settings).result(60)
        assert good.result(60).metrics
        training.optim_step(tinker.types.AdamParams()).result(60)
        sampler = client.create_sampling_client(base_model="tiny").result(60)
        with pytest.raises(tinker.BadRequestError, match="prompt_logprobs"):
            sampler.compute_logprobs(tinker.types.ModelInput.from_ints([1, 2])).result(60)
        client.close("success").result(60)


def test_sdk_continues_over_a_restart(tinker, tmp_path):
    """The server goes away between two calls, and another one continues at its address; the client does not notice."""
    settings = msgspec.structs.replace(SETTINGS, checkpoint_every=100)
    with Server(tmp_path, settings) as server:
        client = tinker.ServiceClient(base_url=server.url, api_key="tml-any")
        training = client.create_lora_training_client("tiny", rank=4, seed=3).result(60)
        sampler = training.save_weights_and_get_sampling_client().result(60)
        for _ in range(2):
            training.forward_backward([datum(tinker, [1, 2, 3, 4])], "cross_entropy").result(60)
            training.optim_step(tinker.types.AdamParams()).result(60)
        bits = server.ranks.models[training.model_id.replace(":", "-")].bits()
    with Server(tmp_path, settings, int(server.url.rpartition(":")[2])) as server:
        training.forward(data=[datum(tinker, [1, 2, 3])], loss_fn="cross_entropy").result(60)
        assert server.ranks.models[training.model_id.replace(":", "-")].bits() == bits
        params = tinker.types.SamplingParams(max_tokens=4)
        assert sampler.sample(tinker.types.ModelInput.from_ints([1]), 1, params).result(60).sequences[0].tokens
        client.close("success").result(60)


def test_service_without_keys_is_on_loopback_only(tinker, tmp_path):
    async def scenario():
        service = Service(NumpyTrainer(tmp_path), NumpySampler(), SETTINGS, tmp_path)
        with pytest.raises(ConfigError, match="keys"):
            await serve(service, "0.0.0.0")

    asyncio.run(scenario())
