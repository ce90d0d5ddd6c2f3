"""Cost models: servers share their rate, tokens carry versions, lengths follow their distribution."""

from __future__ import annotations

import pytest

from realsys.lab.simulation.clock import Clock
from realsys.lab.simulation.rollout import Lengths
from realsys.lab.simulation.scenarios import LengthSettings, ServerSettings
from realsys.lab.simulation.servers import DecodePiece, EngineRequest, SimulatedEngine
from realsys.types import PublishedVersion, Ticket

COSTS = ServerSettings(tokens_per_s=10.0, total_tokens_per_s=20.0, max_running=4, swap_s=1.0)


class Bench:
    """An engine at version 0, and when each request ended."""

    def __init__(self, costs: ServerSettings = COSTS) -> None:
        self.clock = Clock()
        self.engine = SimulatedEngine(self.clock, costs)
        self.ended: list[tuple[float, dict[int, int]]] = []
        self.swap(0)
        self.run()
        self.began = self.clock.now

    def swap(self, version: int) -> None:
        self.engine.swap(PublishedVersion(version, "t", f"v{version}", version), lambda: None)

    def submit(self, *tokens: int) -> EngineRequest:
        pieces = [DecodePiece(index, count) for index, count in enumerate(tokens)]
        request = EngineRequest(pieces, 0, self._done)
        self.engine.submit(request)
        return request

    def _done(self, request: EngineRequest) -> None:
        if request.left:
            return
        versions = {v: n for _, counts in request.sampled for v, n in counts.items()}
        self.ended.append((self.clock.now - self.began, versions))

    def run(self) -> None:
        while self.clock.step():
            pass


def test_completions_share_the_rate() -> None:
    """Four completions of 100 tokens at 20 tokens/s together: 5 each."""
    bench = Bench()
    for _ in range(4):
        bench.submit(100)
    bench.run()
    assert [time for time, _ in bench.ended] == pytest.approx([20.0] * 4)


def test_rate_rises_when_a_completion_ends() -> None:
    bench = Bench()
    for tokens in (50, 50, 50, 100):
        bench.submit(tokens)
    bench.run()
    assert [time for time, _ in bench.ended] == pytest.approx([10.0, 10.0, 10.0, 15.0])


def test_completions_beyond_max_running_queue() -> None:
    bench = Bench(COSTS.model_copy(update={"max_running": 1}))
    bench.submit(10)
    bench.submit(10)
    bench.run()
    assert [time for time, _ in bench.ended] == pytest.approx([1.0, 2.0])


def test_swap_pauses_and_marks_tokens() -> None:
    bench = Bench()
    bench.submit(100)
    bench.clock.after(4.0, bench.swap, 1)
    bench.run()
    assert bench.ended == [(pytest.approx(11.0), {1: 60, 0: 40})]


def test_requests_go_on_after_a_sleep_with_their_tokens_prefilled() -> None:
    """4 s asleep after 5 s, 2 s to wake, 1 s for the swap and 5 s to prefill 50 tokens at 10 per second."""
    costs = {"sleep_s": 0.5, "wake_s": 2.0, "prefill_tokens_per_s": 10.0}
    bench = Bench(COSTS.model_copy(update=costs))
    bench.submit(100)
    bench.clock.after(5.0, bench.engine.shift, True, lambda: None)
    bench.clock.after(9.0, bench.engine.shift, False, lambda: bench.swap(1))
    bench.run()
    assert not bench.engine.asleep
    assert bench.ended == [(pytest.approx(22.0), {0: 50, 1: 50})]


def test_lengths_grow_from_ticket_to_ticket() -> None:
    settings = LengthSettings(kind="constant", mean=100, growth=4.0, grows_from=10, grows_to=20)
    drawn = [Lengths(settings, 1).draw(Ticket(str(n), 1, n, n=1, seed=n))[0] for n in (5, 15, 25)]
    assert drawn == [100, 200, 400]


def test_load_counts_queued_completions_and_cached_tokens() -> None:
    """Two of 10 tokens/s each run for 4 s behind a prompt of 30 tokens, and one waits."""
    bench = Bench(COSTS.model_copy(update={"max_running": 2, "prefill_tokens_per_s": 1e9}))
    pieces = [DecodePiece(index, 100) for index in range(3)]
    bench.engine.submit(EngineRequest(pieces, 30, bench._done))
    loads: list[tuple[int, int]] = []
    bench.clock.after(4.0, lambda: loads.append(bench.engine.load()))
    bench.run()
    assert loads == [(3, pytest.approx(2 * (10 + 40), abs=1))]
    assert bench.engine.load() == (0, 0)


def test_death_loses_the_tokens_so_far() -> None:
    bench = Bench()
    request = bench.submit(100, 20)
    lost: list[int] = []
    bench.clock.after(5.0, lambda: lost.append(bench.engine.die()[id(request)]))
    bench.run()
    assert lost == [50] and len(request.sampled) == 1 and not bench.ended


def test_cancelled_request_frees_its_share() -> None:
    bench = Bench()
    bench.submit(100)
    other = bench.submit(100, 100, 100)
    bench.clock.after(4.0, bench.engine.cancel, other)
    bench.run()
    assert [time for time, _ in bench.ended] == pytest.approx([4.0 + 8.0])


@pytest.mark.parametrize(
    ("settings", "low", "high"),
    [
        (LengthSettings(kind="lognormal", mean=500.0, sigma=0.5), 450, 550),
        (LengthSettings(kind="pareto", shortest=20, longest=1800), 70, 90),
        (LengthSettings(kind="uniform", shortest=100, longest=300), 190, 210),
        (LengthSettings(kind="constant", mean=7.0), 7, 7),
    ],
    ids=lambda value: getattr(value, "kind", ""),
)
def test_lengths_have_the_mean_of_their_kind(settings: LengthSettings, low: int, high: int) -> None:
    lengths = Lengths(settings.model_copy(update={"prompt_share": 0.2}), seed=1)
    drawn = [k for prompt in range(800) for k in lengths.draw(Ticket("0", 0, prompt, n=8, seed=prompt))]
    assert low <= sum(drawn) / len(drawn) <= high
    assert settings.shortest <= min(drawn) and max(drawn) <= settings.longest


def test_prompt_is_long_again_when_issued_again() -> None:
    lengths = Lengths(LengthSettings(prompt_share=1.0), seed=1)
    first, again, other = (lengths.draw(Ticket("0", 0, p, n=2, seed=s)) for p, s in ((5, 1), (5, 2), (6, 1)))
    assert first == again != other
