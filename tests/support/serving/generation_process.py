"""An embedded engine behind HTTP in a separate process, to be killed: ``python -m MODULE MODEL N``.

Prints its URL. After N sampled tokens it pauses in the middle of completions; 0: never. It stops like a
GenerationServer when its standard input ends.
"""

import sys
from pathlib import Path

import torch

from realsys.cluster.http_server import HttpServer
from realsys.config.schema import EmbeddedConfig, GenerationConfig
from realsys.generation.embedded.core import EngineCore
from realsys.generation.embedded.engine import build_engine
from realsys.generation.server import build_app, stop_serving
from realsys.weights.disk.stage import DiskReader


def main() -> None:
    model_path, pause_after = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)

    def on_step(core: EngineCore) -> None:
        if core.counters.tokens >= pause_after > 0:
            engine.pause("in_place")

    engine = build_engine(
        model_path,
        GenerationConfig(embedded=EmbeddedConfig(max_running=4, max_queued=4, context_length=128)),
        DiskReader().stage,
        on_step=on_step,
    )
    engine.start()
    http = HttpServer(build_app(engine))
    http.start()
    print(http.url, flush=True)
    sys.stdin.read()
    stop_serving(engine, http)


if __name__ == "__main__":
    main()
