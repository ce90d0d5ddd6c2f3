from realsys.observe.rate import RateWindow


def test_rate_window_expires_and_starts_low() -> None:
    window = RateWindow(window_s=10)
    assert window.rate(0.0) == 0.0
    window.add(50, 100.0)
    assert window.rate(100.1) == 50.0, "a burst in the first instant is not a million per second"
    window.add(50, 104.0)
    assert window.rate(105.0) == 20.0
    assert window.rate(200.0) == 0.0 and window.total == 100
