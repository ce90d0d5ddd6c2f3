"""An engine behind HTTP in a separate process, to be killed: ``python -m MODULE MODEL N``.

Prints its URL. The embedded engine pauses in the middle of completions after N sampled tokens; 0: never. If N is
``sglang`` the engine is SGLang. The process stops like a GenerationServer when its standard input ends.
"""

import sys
from pathlib import Path

import torch

from realsys.cluster.http_server import HttpServer
from realsys.config.schema import EmbeddedConfig, GenerationConfig
from realsys.generation.backend import GenerationEngine
from realsys.generation.embedded.core import EngineCore
from realsys.generation.embedded.engine import build_engine
from realsys.generation.server import build_app, stop_serving
from realsys.weights.disk.stage import DiskReader

CONTEXT = 4096


def main() -> None:
    torch.set_num_threads(1)
    model_path, which = Path(sys.argv[1]), sys.argv[2]
    engine = sglang(model_path) if which == "sglang" else embedded(model_path, int(which))
    engine.start()
    http = HttpServer(build_app(engine))
    http.start()
    print(http.url, flush=True)
    sys.stdin.read()
    stop_serving(engine, http)


def sglang(model_path: Path) -> GenerationEngine:
    from tests.support.serving.sglang_server import sglang_engine

    args = f"generation.sglang.args={{'context-length': {CONTEXT}}}"
    return sglang_engine(model_path, args, on_change=lambda change: None)


def embedded(model_path: Path, pause_after: int) -> GenerationEngine:
    def on_step(core: EngineCore) -> None:
        if core.counters.tokens >= pause_after > 0:
            engine.pause("in_place")

    engine = build_engine(
        model_path,
        GenerationConfig(embedded=EmbeddedConfig(max_running=4, max_queued=4, context_length=CONTEXT)),
        DiskReader().stage,
        on_step=on_step,
    )
    return engine


if __name__ == "__main__":
    main()
