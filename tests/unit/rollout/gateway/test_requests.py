"""Repeats of requests: which get the same completion, and when entries end. The clock is a number."""

import pytest

from realsys.rollout.gateway.repeated_requests import MOST_RECEIVED, Requests

WINDOW_S = 10.0
A, B = b"a", b"b"


@pytest.fixture
def requests():
    return Requests(WINDOW_S)


def begin(requests, digest=A, key="", retry=False):
    entry, new = requests.begin(digest, key, retry)
    return entry.number, new


def test_equal_requests_are_two_samples(requests):
    assert begin(requests) == (0, True) and begin(requests) == (1, True)


def test_retry_of_waiting_request_joins_it(requests):
    begin(requests)
    begin(requests)
    assert begin(requests, retry=True) == (0, False)
    assert begin(requests, B, retry=True) == (2, True)
    assert requests.repeats == 1


def test_retry_takes_the_broken_request_first(requests):
    begin(requests)
    second, _ = requests.begin(A, "", False)
    requests.broken(second, 0.0)
    assert begin(requests, retry=True) == (1, False)


def test_abandoned_request_is_repeated_without_a_header(requests):
    entry, _ = requests.begin(A, "", False)
    requests.broken(entry, 0.0)
    assert begin(requests, B) == (1, True)
    assert begin(requests) == (0, False)
    assert begin(requests) == (2, True)


def test_received_request_is_repeated_only_by_a_retry(requests):
    entry, _ = requests.begin(A, "", False)
    requests.complete(entry)
    assert requests.sent(entry, 0.0)
    assert begin(requests) == (1, True)
    requests.fail(requests.begin(B, "", False)[0], True)
    assert begin(requests, retry=True)[1] is False


def test_key_names_a_request(requests):
    entry, _ = requests.begin(A, "k", False)
    requests.sent(entry, 0.0)
    assert begin(requests, key="k") == (0, False)
    assert begin(requests, key="other") == (1, True)
    with pytest.raises(ValueError, match="belongs to a request with another body"):
        requests.begin(B, "k", False)


def test_abandoned_request_with_a_key_needs_the_key(requests):
    entry, _ = requests.begin(A, "k", False)
    requests.broken(entry, 0.0)
    assert begin(requests) == (1, True)
    assert begin(requests, key="k") == (0, False)


def test_retry_after_an_error_is_a_new_request(requests):
    begin(requests)
    failed, _ = requests.begin(A, "", False)
    requests.fail(failed, True)
    assert begin(requests, retry=True) == (2, True)
    assert begin(requests, retry=True) == (0, False)


def test_each_connection_of_an_error_may_retry(requests):
    failed, _ = requests.begin(A, "", False)
    requests.begin(A, "", True)
    requests.fail(failed, True)
    requests.sent(failed, 0.0)  # the error was sent
    assert begin(requests, retry=True) == (1, True) and begin(requests, retry=True) == (2, True)


def test_new_request_forgets_an_error_without_retry(requests):
    """The client has given up after the error. The retry belongs to its next call."""
    requests.fail(requests.begin(A, "", False)[0], True)
    assert begin(requests) == (1, True)
    assert begin(requests, retry=True) == (1, False)


def test_final_error_expects_no_retry(requests):
    requests.begin(A, "", False)
    requests.fail(requests.begin(A, "", False)[0], False)
    assert begin(requests, retry=True) == (0, False)


def test_abandoned_request_ends_after_the_window(requests):
    entry, _ = requests.begin(A, "", False)
    assert requests.next_end() is None
    requests.broken(entry, 5.0)
    assert requests.next_end() == 5.0 + WINDOW_S and requests.due(14.9) == []
    assert requests.due(15.0) == [entry] and requests.next_end() is None
    assert begin(requests) == (1, True)


def test_repeat_stops_the_window(requests):
    entry, _ = requests.begin(A, "", False)
    requests.broken(entry, 0.0)
    requests.begin(A, "", False)
    assert requests.due(1e9) == []
    requests.broken(entry, 100.0)
    assert requests.due(105.0) == [] and requests.due(110.0) == [entry]


def test_reply_is_received_once(requests):
    entry, _ = requests.begin(A, "", False)
    requests.begin(A, "", True)
    requests.complete(entry)
    assert requests.sent(entry, 0.0) and not requests.sent(entry, 1.0)
    assert requests.due(10.9) == [] and requests.due(11.0) == [entry]


def test_one_open_connection_keeps_the_request(requests):
    entry, _ = requests.begin(A, "", False)
    requests.begin(A, "", True)
    requests.broken(entry, 0.0)
    assert requests.next_end() is None
    assert begin(requests) == (1, True)


def test_old_received_requests_are_forgotten(requests):
    for number in range(MOST_RECEIVED + 5):
        entry, _ = requests.begin(str(number).encode(), "", False)
        requests.sent(entry, 0.0)
    assert [entry.number for entry in requests.due(1.0)] == list(range(5))
