"""The training service over a model in numpy: order, restarts, tenants, limits, keys."""

import asyncio
import itertools
import secrets
from pathlib import Path

import msgspec
import numpy as np
import pytest

from realsys.cluster.http_server import RefusedRequest
from realsys.serve import wire
from realsys.serve.journal import TenantJournal, audit
from realsys.serve.settings import Owner
from tests.support.needs import need_package
from tests.support.serve.numpy_ranks import Killed, NumpyTrainer
from tests.support.serve.tinker_calls import SETTINGS, Client, json_call, passing, serving, stepping


@pytest.fixture(autouse=True)
def tinker():
    need_package("tinker")


def run_of(model, shift=0):
    """Return the calls of a whole run, by seq_id, which has every kind, and a save and a load in it."""
    rows = [[(1 + i * j + shift) % 11 for j in range(3 + i)] for i in range(8)]
    saved = f"tinker://{model}/weights/a"
    calls = [
        lambda n: passing(model, n, rows[0]),
        lambda n: passing(model, n, rows[1]),
        lambda n: stepping(model, n),
        lambda n: passing(model, n, rows[2]),
        lambda n: stepping(model, n),
        lambda n: json_call("save_weights", model, n, path="a"),
        lambda n: passing(model, n, rows[3], loss="importance_sampling", logprobs=-np.ones(6), advantages=np.ones(6)),
        lambda n: json_call("save_weights_for_sampler", model, n, path="s"),
        lambda n: stepping(model, n, rate=-1.0),  # refused
        lambda n: stepping(model, n),
        lambda n: passing(model, n, rows[7], weights=np.full(10, 1e9)),
        lambda n: stepping(model, n),  # refused, and the gradient is dropped
        lambda n: passing(model, n, rows[0]),
        lambda n: stepping(model, n),
        lambda n: passing(model, n, rows[4], forward_only=True),
        lambda n: json_call("load_weights", model, n, path=saved, optimizer=True),
        lambda n: passing(model, n, rows[5]),
        lambda n: stepping(model, n),
        lambda n: json_call("save_weights", model, n, path="a", overwrite=True),
        lambda n: passing(model, n, rows[6]),
    ]
    return {seq: call(seq) for seq, call in enumerate(calls, 1)}


async def whole_run(client, session, number=0, shift=0):
    """Send a run, or send it again. Returns its results."""
    model = await client.create(session, number)
    ids = [f"{model}:0"] + [await client.call(model, seq, call) for seq, call in run_of(model, shift).items()]
    return [await client.result(each) for each in ids]


@pytest.fixture
def ids(monkeypatch):
    """Sessions have the same names in all services."""
    count = itertools.count()
    monkeypatch.setattr(secrets, "token_hex", lambda size: f"s{next(count)}")
    return count


async def until(holds):
    async with asyncio.timeout(30):
        while not holds():  # noqa: ASYNC110 (the service has no event for it)
            await asyncio.sleep(0.01)


def expected_of(folder, monkeypatch):
    async def scenario():
        async with serving(folder) as service:
            client = Client(service)
            await client.service.create_session(client.owner)
            results = await whole_run(client, "s0")
            return results, service.ranks.models["s0-train-0"].bits(), service.ranks.calls

    monkeypatch.setattr(secrets, "token_hex", lambda size: "s0")
    return asyncio.run(scenario())


async def resumed(folder, trainer=None):
    """Continue a run after a kill, as the client would. Returns results and state."""
    async with serving(folder, trainer=trainer) as service:
        client = Client(service)
        if "s0" not in service._sessions:
            await service.create_session(client.owner)
        results = await whole_run(client, "s0")
        if not (tenant := service.tenants["s0-train-0".replace("-", ":")]).loaded:
            await service._restore(tenant)  # the killed process had done all
        return results, service.ranks.models["s0-train-0"].bits()


@pytest.mark.parametrize("compact_above", [1 << 20, 1500])
def test_every_call_that_kills_is_done_once(tmp_path, monkeypatch, compact_above):
    """The process dies in each call of the ranks, after it changed their state and before its result is recorded."""
    monkeypatch.setattr("realsys.serve.journal._COMPACT_ABOVE", compact_above)
    results, bits, calls = expected_of(tmp_path / "whole", monkeypatch)
    for index in range(len(calls)):
        folder = tmp_path / str(index)
        with pytest.raises(Killed):
            asyncio.run(resumed(folder, NumpyTrainer(folder / "snapshots", kill_at=index)))
        assert asyncio.run(resumed(folder)) == (results, bits), calls[index]
        assert audit(folder / "service") == []


def test_gradients_after_a_refused_step_survive_a_restart(tmp_path, ids, monkeypatch):
    """Also if it is time for a checkpoint, which has no gradients."""
    monkeypatch.setattr(TenantJournal, "is_large", True)

    async def life(folder, seqs):
        async with serving(folder) as service:
            client = Client(service)
            if not service._sessions:
                await service.create_session(client.owner)
            (session,) = service._sessions
            model = await client.create(session)
            calls = {
                1: passing(model, 1, [1, 2, 3]),
                2: stepping(model, 2, rate=-1.0),
                3: passing(model, 3, [1], forward_only=True),  # begins when all of the call before it is done
                4: stepping(model, 4),
            }
            return [await client.result(await client.call(model, seq, calls[seq])) for seq in seqs][-1]

    whole = asyncio.run(life(tmp_path / "whole", (1, 2, 3, 4)))
    asyncio.run(life(tmp_path / "cut", (1, 2, 3)))
    assert asyncio.run(life(tmp_path / "cut", (4,))) == whole


def test_run_that_is_killed_again_and_again_ends_alike(tmp_path, monkeypatch):
    """Each life ends after ten calls of the ranks, most of which repeat what the life before it did."""
    results, bits, _ = expected_of(tmp_path / "whole", monkeypatch)
    folder = tmp_path / "lives"
    deaths, again = 0, None
    while again is None:
        try:
            again = asyncio.run(resumed(folder, NumpyTrainer(folder / "snapshots", kill_at=9)))
        except Killed:
            deaths += 1
    assert again == (results, bits) and deaths >= 2
    assert audit(folder / "service") == []


@pytest.mark.parametrize("when", ["before", "after", "torn"])
def test_kill_at_every_record_changes_nothing(tmp_path, monkeypatch, when):
    """The process dies before or after each record is written, or in the middle of it."""
    results, bits, _ = expected_of(tmp_path / "whole", monkeypatch)
    append, count, at = TenantJournal.append, itertools.count(), -1

    def dying(journal, *records):
        if "sessions" in str(journal._journal.path) or next(count) != at:
            return append(journal, *records)
        if when != "before":
            append(journal, *records)
        if when == "torn":
            path = journal._journal.path
            with path.open("r+b") as file:
                file.truncate(path.stat().st_size - 5)
        raise Killed(records)

    for at in itertools.count():
        count, folder = itertools.count(), tmp_path / str(at)
        with monkeypatch.context() as patch:
            patch.setattr(TenantJournal, "append", dying)
            try:
                asyncio.run(resumed(folder))
                break
            except Killed:
                pass
        assert asyncio.run(resumed(folder)) == (results, bits), at
        assert audit(folder / "service") == []
    assert at > 40


def test_interleaved_tenants_equal_lone_ones(tmp_path, ids):
    async def alone(folder, shift):
        async with serving(folder) as service:
            client = Client(service)
            session = await service.create_session(client.owner)
            await whole_run(client, session, shift=shift)
            return service.ranks.models[f"{session}-train-0"].bits()

    async def together(folder):
        async with serving(folder) as service:
            client = Client(service)
            session = await service.create_session(client.owner)
            await asyncio.gather(*(whole_run(client, session, number, number) for number in range(4)))
            calls = [tenant for tenant, method in service.ranks.calls if method in ("forward_backward", "step")]
            changes = sum(before != after for before, after in itertools.pairwise(calls))
            return (
                [service.ranks.models[f"{session}-train-{number}"].bits() for number in range(4)],
                changes,
                len(calls),
            )

    bits, changes, calls = asyncio.run(together(tmp_path / "together"))
    assert changes > calls / 2
    assert bits == [asyncio.run(alone(tmp_path / str(shift), shift)) for shift in range(4)]


def test_calls_run_in_order_of_seq_id(tmp_path):
    async def scenario():
        async with serving(tmp_path) as service:
            client = Client(service)
            model = await client.create(await service.create_session(client.owner))
            for seq in (3, 2, 4):
                await client.call(model, seq, passing(model, seq, [seq, 1]))
            assert await client.result(f"{model}:0")
            assert [method for _, method in service.ranks.calls] == ["start"]
            first = await client.call(model, 1, passing(model, 1, [1, 1]))
            assert await client.call(model, 1, passing(model, 1, [1, 1])) == first
            results = [await client.result(f"{model}:{seq}") for seq in (1, 2, 3, 4)]
            assert len(set(results)) == 4
            assert len(service.ranks.calls) == 5
        assert audit(tmp_path / "service") == []

    asyncio.run(scenario())


def test_missing_call_fails_those_after_it(tmp_path):
    async def scenario():
        async with serving(tmp_path, msgspec.structs.replace(SETTINGS, missing_s=0.0)) as service:
            client = Client(service)
            model = await client.create(await service.create_session(client.owner))
            await client.result(f"{model}:0")
            category, why = await client.result(await client.call(model, 2, stepping(model, 2)))
            assert category == "user" and f"call 1 of {model}, which comes before" in why
            await client.result(await client.call(model, 1, stepping(model, 1)))
            await client.result(await client.call(model, 3, stepping(model, 3)))
            assert service.tenants[model].steps == 2
        assert audit(tmp_path / "service") == []

    asyncio.run(scenario())


def test_poisoned_call_fails_alone(tmp_path, ids):
    """A call that kills the process fails after two restarts; its tenant and the others go on."""

    async def life(poison):
        trainer = NumpyTrainer(tmp_path / "snapshots")
        trainer.poison = {poison}
        async with serving(tmp_path, trainer=trainer) as service:
            client = Client(service)
            if not service._sessions:
                await service.create_session(client.owner)
            bad, good = [await client.create("s0", number) for number in range(2)]
            calls = [await client.call(bad, 1, passing(bad, 1, [1] * 9)), await client.call(bad, 2, stepping(bad, 2))]
            other = await client.call(good, 1, stepping(good, 1))
            results = [await client.result(each) for each in (*calls, other)]
            return results

    for _ in range(3):
        with pytest.raises(Killed):
            asyncio.run(life(10))
    failed, step, other = asyncio.run(life(10))
    assert failed[0] == "server" and b"metrics" in step and b"metrics" in other
    assert audit(tmp_path / "service") == []


def test_stop_in_a_call_is_no_attempt(tmp_path):
    async def scenario(stop):
        trainer = NumpyTrainer(tmp_path / "snapshots")
        async with serving(tmp_path, trainer=trainer) as service:
            client = Client(service)
            session = next(iter(service._sessions), None) or await service.create_session(client.owner)
            model = await client.create(session)
            await client.result(f"{model}:0")
            if stop:
                reached, trainer.step = asyncio.Event(), None

                async def step(*_):
                    reached.set()
                    await asyncio.Event().wait()

                trainer.step = step
            request = await client.call(model, 1, stepping(model, 1))
            if stop:
                await reached.wait()
            else:
                assert b"metrics" in await client.result(request)

    for _ in range(4):
        asyncio.run(scenario(stop=True))
    asyncio.run(scenario(stop=False))


def test_samples_come_from_the_weights_that_were_saved(tmp_path):
    async def scenario():
        async with serving(tmp_path) as service:
            client = Client(service)
            session = await service.create_session(client.owner)
            model = await client.create(session)
            seq = itertools.count(1)

            async def train():
                n = next(seq)
                await client.call(model, n, passing(model, n, [1, 2, 3, 4]))
                n = next(seq)
                return await client.result(await client.call(model, n, stepping(model, n, 1.0)))

            async def save(number, kind="snapshot"):
                n = next(seq)
                call = json_call("save_weights_for_sampler", model, n, sampling_session_seq_id=number, kind=kind)
                reply = await client.result(await client.call(model, n, call))
                return msgspec.json.decode(reply)["sampling_session_id"]

            async def sample(sampler, number):
                prompt = wire.ModelInput([wire.InputChunk("encoded_text", [1])])
                params = wire.SamplingParams(max_tokens=3)
                request = wire.Sample(prompt, params, sampling_session_id=sampler, seq_id=number)
                future = service.sample(client.owner, request)
                reply = wire.messages().SampleResponse()
                reply.ParseFromString(await client.result(future["request_id"]))
                return np.frombuffer(reply.sequences[0].logprobs, np.float32).tolist()

            pinned, moving = await save(0), await save(1, "inflight")
            before = await sample(pinned, 0)
            assert await sample(moving, 0) == before
            await train()
            newest = await save(2, "inflight")
            assert await sample(pinned, 1) == before
            assert await sample(moving, 1) == await sample(newest, 0) != before
            for number in range(3, 13):
                await save(number)
            with pytest.raises(RefusedRequest, match="newest 8 snapshots"):
                await sample(pinned, 2)
            await train()
            assert len(service.ranks.kept) == 9

    asyncio.run(scenario())


def test_lost_sample_is_410_after_a_restart(tmp_path):
    async def scenario():
        async with serving(tmp_path) as service:
            client = Client(service)
            session = await service.create_session(client.owner)
            request = wire.CreateSampler(session, 0, base_model="tiny")
            sampler = await service.create_sampler(client.owner, request)
        async with serving(tmp_path) as service:
            assert service.sampler(client.owner, sampler) == ""
            with pytest.raises(RefusedRequest) as refused:
                await service.retrieve(client.owner, f"{sampler}:0")
            assert refused.value.status == 410

    asyncio.run(scenario())


def test_key_sees_only_its_own(tmp_path, monkeypatch):
    owners = (Owner("tml-a", name="a", models=1), Owner("tml-b", name="b"))

    async def scenario():
        async with serving(tmp_path, msgspec.structs.replace(SETTINGS, owners=owners)) as service:
            mine, theirs = (Client(service, service.owner(f"tml-{name}")) for name in "ab")
            session = await service.create_session(mine.owner)
            model = await mine.create(session)
            saved = await mine.call(model, 1, json_call("save_weights", model, 1, path="a"))
            await mine.result(saved)
            path = f"tinker://{model}/weights/a"
            for attempt in (
                lambda: theirs.call(model, 2, stepping(model, 2)),
                lambda: theirs.result(saved),
                lambda: theirs.create(session, 1),
                lambda: service.unload(theirs.owner, model),
                lambda: service.load_weights(theirs.owner, wire.LoadWeights(path, True, session_id=session)),
            ):
                with pytest.raises(RefusedRequest) as refused:
                    await attempt()
                assert refused.value.status == 404
            with pytest.raises(RefusedRequest, match="1 models"):
                await mine.create(session, 1)
            monkeypatch.setattr("realsys.serve.service._HEARTBEAT_S", 0.0)  # one has not come
            with pytest.raises(RefusedRequest) as refused:
                await mine.create(session, 1)
            assert refused.value.status == 429 and 0 < refused.value.retry_after_s <= 60
            monkeypatch.setattr("realsys.serve.service._SILENT_S", 0.0)  # its client has died
            model = await mine.create(session, 1)
            assert service.tenants[f"{session}:train:0"].unloaded
            assert b"create_model" in await mine.result(f"{model}:0")
            with pytest.raises(RefusedRequest, match="not a key"):
                service.owner("tml-c")
            await service.finish_session(mine.owner, session)
            other = await service.create_session(mine.owner)
            request = wire.LoadWeights(path, True, session_id=other)
            loaded = await service.load_weights(mine.owner, request)
            assert b"load_weights" in await mine.result(loaded["request_id"])
            assert "tml" not in str(service.status())

    asyncio.run(scenario())


def test_too_many_waiting_calls_are_429(tmp_path):
    settings = msgspec.structs.replace(SETTINGS, owners=(Owner("k", name="a", calls_waiting=2, tokens_per_call=5),))

    async def scenario():
        async with serving(tmp_path, settings) as service:
            client = Client(service, service.owner("k"))
            model = await client.create(await service.create_session(client.owner))
            await client.result(f"{model}:0")
            for seq in (3, 2):
                await client.call(model, seq, stepping(model, seq))
            with pytest.raises(RefusedRequest) as refused:
                await client.call(model, 4, stepping(model, 4))
            assert refused.value.status == 429
            large = await client.call(model, 1, passing(model, 1, [1] * 8))
            assert "at most 5 tokens" in (await client.result(large))[1]
            await client.result(f"{model}:3")

    asyncio.run(scenario())


def test_waiting_bytes_of_a_model_are_bounded(tmp_path, monkeypatch):
    async def scenario():
        async with serving(tmp_path) as service:
            client = Client(service)
            model = await client.create(await service.create_session(client.owner))
            await client.result(f"{model}:0")
            call = passing(model, 1, [1] * 8)
            monkeypatch.setattr("realsys.serve.service._OWNER_BYTES", 3 * len(call[1]) - 1)
            for seq in (2, 3):
                await client.call(model, seq, passing(model, seq, [1] * 8))
            with pytest.raises(RefusedRequest, match="bytes: the limit") as refused:
                await client.call(model, 4, passing(model, 4, [1] * 8))
            assert refused.value.status == 429
            await client.call(model, 1, call)  # those after it wait for it
            await client.result(f"{model}:3")

    asyncio.run(scenario())


def test_unloaded_model_has_a_small_closed_journal(tmp_path):
    """Weights with a name remain, and can be deleted, also after a restart."""

    def files():
        opened = (path.resolve() for path in Path("/proc/self/fd").iterdir())
        return [path for path in opened if path.is_relative_to(tmp_path) and path.name == "journal"]

    async def scenario():
        async with serving(tmp_path) as service:
            client = Client(service)
            session = await service.create_session(client.owner)
            model = await client.create(session)
            for seq, call in run_of(model).items():
                await client.result(await client.call(model, seq, call))
            path = service.tenants[model].folder / "journal"
            before, last_call = path.stat().st_size, service.tenants[model].last_call
            await service.unload(client.owner, model)
            await until(lambda: not service._turns)
            other = await client.create(session, 1)
            await client.result(f"{other}:0")
            assert len(files()) == 2, "that of the sessions, and that of the other model"
            assert path.stat().st_size < before / 2
            assert [each.name for each in path.parent.glob("state-*")] == []
        async with serving(tmp_path) as service:
            assert len(files()) == 2
            assert service.tenants[model].last_call == last_call > 0
            sampled, saved = list(service.tenants[model].names)  # the save was repeated
            await service.delete(client.owner, model, saved.split("/", 3)[3])
        async with serving(tmp_path) as service:
            assert list(service.tenants[model].names) == [sampled] and service.tenants[model].unloaded
            await until(lambda: not any(path.parent.glob("weights-*")))
        assert audit(tmp_path / "service") == []

    asyncio.run(scenario())


def test_large_journal_is_compacted_and_continues(tmp_path, monkeypatch):
    monkeypatch.setattr("realsys.serve.journal._COMPACT_ABOVE", 1500)
    results, bits, _ = expected_of(tmp_path / "whole", monkeypatch)
    monkeypatch.undo()
    path = tmp_path / "whole/service/s0-train-0/journal"
    assert b'"snapshot"' in path.read_bytes()[:60]
    again, after = asyncio.run(resumed(tmp_path / "whole"))
    assert (again, after) == (results, bits)
    assert audit(tmp_path / "whole/service") == []


def test_state_that_cannot_be_restored_fails_for_good(tmp_path, ids):
    """The process dies while it restores a tenant: after two restarts, every call of the tenant fails at once."""

    async def life(poison, seq):
        trainer = NumpyTrainer(tmp_path / "snapshots")
        trainer.poison = poison
        async with serving(tmp_path, trainer=trainer) as service:
            client = Client(service)
            if not service._sessions:
                await service.create_session(client.owner)
            model = await client.create("s0")
            call = passing(model, seq, [1] * 9) if seq == 1 else stepping(model, seq)
            return await client.result(await client.call(model, seq, call))

    assert isinstance(asyncio.run(life(set(), 1)), bytes)
    for _ in range(3):
        with pytest.raises(Killed):
            asyncio.run(life({10}, 2))
    for seq in (2, 3, 4):
        category, why = asyncio.run(life({10}, seq))
        assert category == "server" and "cannot be restored" in why
    assert audit(tmp_path / "service") == []


def test_journal_of_forward_passes_stays_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr("realsys.serve.journal._COMPACT_ABOVE", 20_000)

    async def scenario():
        async with serving(tmp_path) as service:
            client = Client(service)
            model = await client.create(await service.create_session(client.owner))
            sizes = []
            for seq in range(1, 121):
                await client.result(await client.call(model, seq, passing(model, seq, [1, 2, 3], forward_only=True)))
                sizes.append(service.tenants[model].journal._journal.size)
            assert max(sizes) < 40_000 and len(service.tenants[model].results) < 100

    asyncio.run(scenario())
    assert audit(tmp_path / "service") == []
