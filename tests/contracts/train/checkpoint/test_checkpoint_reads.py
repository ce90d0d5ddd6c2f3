"""A checkpoint is read once per replica group, not once per data rank; an error of one rank is one of all."""

import pytest

from realsys.config.allocation import ParallelLayout
from realsys.errors import CheckpointError
from realsys.train.checkpoint.checkpoint_files import CheckpointPiece
from realsys.train.checkpoint.saver import GENERATOR, load_checkpoint
from realsys.train.checkpoint.tensors import PieceReader
from tests.support.training.checkpoint_ranks import Setup, checkpoint, make_models

D2 = ParallelLayout(data=2)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return make_models(tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize(
    ("written", "read"),
    [
        (Setup(D2), Setup(D2)),
        (Setup(D2, distributed=True), Setup(D2, distributed=True)),
        (Setup(), Setup(D2)),
        (Setup(D2, distributed=True, dtype="bfloat16"), Setup(ParallelLayout(data=2, tensor=2), dtype="bfloat16")),
    ],
    ids=str,
)
def test_each_byte_is_read_once_per_group(written, read, models, tmp_path):
    directory, _ = checkpoint(written, models["untied"], tmp_path)
    load = PieceReader._load

    def body(role):
        """The position, the bytes read for it, and the bytes of the checkpoint."""
        pieces: list[CheckpointPiece] = []
        everything = 0

        def counted(self, path, piece):
            if piece.kind != GENERATOR and (self._last is None or self._last[0] is not piece):
                pieces.append(piece)
            return load(self, path, piece)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(PieceReader, "_load", counted)
            load_checkpoint(role, directory)
        everything = sum(path.stat().st_size for path in directory.glob("*.safetensors"))
        return role.groups.tensor_rank, sum(piece.size for piece in pieces), everything

    ranks = read.run(body, models["untied"])
    for position in {rank[0] for rank in ranks}:
        group = [size for tensor, size, _ in ranks if tensor == position]
        # A number of an optimizer is read by each of its owners.
        assert sum(group) <= ranks[0][2] + 1000
        assert min(group) > 0.2 * sum(group), "the ranks share the work"


@pytest.mark.parametrize("distributed", [False, True])
def test_damage_that_one_rank_meets_is_everyones(distributed, models, tmp_path):
    """The rank that does not read the damaged part waits for no broadcast."""
    setup = Setup(D2, distributed=distributed)
    directory, _ = checkpoint(setup, models["untied"], tmp_path)
    file = sorted(directory.glob("*.safetensors"))[1]
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)

    def body(role):
        with pytest.raises(CheckpointError) as caught:
            load_checkpoint(role, directory)
        return str(caught.value)

    first, second = setup.run(body, models["untied"])
    assert f"{file} is corrupt" in first and first == second
