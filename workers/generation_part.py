"""A part of a GenerationServer that spans nodes: the engine's processes of one node, all but the first.

The first part is the GenerationServer itself. It registers and serves; the launcher restarts all parts together.
"""

from __future__ import annotations

from realsys.cluster.worker import WorkerContext, worker_main


def serve(ctx: WorkerContext) -> None:
    """Run the part until asked to stop. Raises GenerationError if it ends before that."""
    from realsys.generation.backend import PartParts, make_backend, own_span

    model_path = ctx.paths.base_model(ctx.config)
    span = own_span()
    ctx.set_state("serving")
    make_backend(ctx.config).run_part(PartParts(ctx.config, model_path, ctx.index // span.nodes, span, ctx.on_stop))


def main() -> None:
    worker_main("generation_part", serve)


if __name__ == "__main__":
    main()
