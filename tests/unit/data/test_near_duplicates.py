"""Near-duplicates of held-out prompts, against a comparison of every pair."""

from hypothesis import given, settings
from hypothesis import strategies as st

from realsys.data.check import SIMILAR, NearDuplicates, shingles

TEXTS = st.lists(st.sampled_from("abcd"), min_size=1, max_size=14).map(" ".join)


def jaccard(a, b):
    one, other = shingles(a), shingles(b)
    return len(one & other) / len(one | other)


@settings(max_examples=300, deadline=None)
@given(st.lists(TEXTS, min_size=1, max_size=8), st.lists(TEXTS, max_size=8))
def test_index_misses_no_pair(held_out, train):
    index = NearDuplicates()
    for number, text in enumerate(held_out):
        index.add(str(number), text)
    for text in train:
        best = max(jaccard(text, other) for other in held_out)
        found = index.nearest(text)
        assert (found.similarity if found else 0.0) == (best if best >= SIMILAR else 0.0)


def test_one_changed_word_is_near():
    text = "A farmer has 12 cows and sells 3 of them to his neighbour, who already has 20 cows on a large green field"
    index = NearDuplicates()
    index.add("e:1", text)
    assert index.nearest(text.replace("green", "wide")).where == "e:1"
    assert index.nearest(text.upper()).similarity == 1.0
    assert index.nearest("A farmer has 12 cows and buys 3 more from a neighbour. How many cows has he?") is None


def test_short_prompts_are_near_only_if_equal():
    index = NearDuplicates()
    index.add("e:1", "2+2")
    assert index.nearest("2 + 2").similarity == 1.0
    assert index.nearest("2+3") is None and index.nearest("") is None
