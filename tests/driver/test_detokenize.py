"""Text as it comes: whole characters, the same in any portions, and nothing of what follows a stop string."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tokenizers import write_tokenizer
from tokenizers import Tokenizer, decoders, models

from raysonar.driver.detokenize import Detokenizer, StopScanner

TEXTS = st.text(st.sampled_from("abc Ωß東🙂é\n"), max_size=30)


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory):
    folder = write_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def sentencepiece():
    """Llama's kind: a leading space is a mark that goes at the start of a text, unknown characters are bytes."""
    words = ["▁", "▁a", "▁b", "a", "b", "▁ab", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def deltas_of(decoder, ids):
    detokenizer = Detokenizer(decoder)
    deltas = [detokenizer.add(token) for token in ids]
    return deltas, detokenizer.flush()


@given(text=TEXTS)
def test_deltas_never_split_a_character(byte_level, text):
    ids = byte_level.encode(text, add_special_tokens=False).ids
    deltas, rest = deltas_of(byte_level, ids)
    assert "".join(deltas) == text
    assert rest == ""
    assert not any("\ufffd" in delta for delta in deltas)


@given(ids=st.lists(st.integers(0, 383), max_size=60))
@settings(deadline=None)
def test_any_ids_give_the_text_that_decoding_them_at_once_gives(byte_level, ids):
    deltas, rest = deltas_of(byte_level, ids)
    assert "".join(deltas) + rest == byte_level.decode(ids)


@given(ids=st.lists(st.sampled_from([*range(4, 40), *range(200, 260)]), min_size=30, max_size=200))
@settings(deadline=None, max_examples=200)
def test_long_runs_of_bytes_that_are_no_characters_are_what_decoding_them_at_once_gives(byte_level, ids):
    deltas, rest = deltas_of(byte_level, ids)
    assert "".join(deltas) + rest == byte_level.decode(ids)


class Watched:
    """A decoder that remembers the most tokens it was asked for at once."""

    def __init__(self, decoder):
        self._decoder, self.longest = decoder, 0

    def decode(self, ids, **options):
        self.longest = max(self.longest, len(ids))
        return self._decoder.decode(ids, **options)


@pytest.mark.parametrize("pieces", [["<0xFF>"], ["<0xE6>", "<0xE6>", "<0x9D>"], ["<0x80>", "<0xF0>"]])
def test_endless_invalid_bytes_are_given_out_as_they_come(sentencepiece, pieces):
    watched = Watched(sentencepiece)
    ids = [sentencepiece.token_to_id(piece) for piece in pieces] * 300
    deltas, rest = deltas_of(watched, [sentencepiece.token_to_id("a"), *ids])
    assert "".join(deltas) + rest == "a" + "\ufffd" * len(ids)
    assert watched.longest < 64
    assert len(rest) < 32


def test_endless_invalid_bytes_of_a_byte_level_tokenizer_are_given_out_as_they_come(byte_level):
    watched = Watched(byte_level)
    ids = [byte_level.token_to_id("ÿ"), byte_level.token_to_id("ð")] * 500
    deltas, rest = deltas_of(watched, ids)
    assert "".join(deltas) + rest == byte_level.decode(ids)
    assert watched.longest < 64
    assert len(rest) < 32


@given(text=st.lists(st.sampled_from(["▁", "▁a", "▁b", "a", "b", "▁ab", "é", "東", "🙂"]), max_size=30))
@settings(deadline=None)
def test_spaces_and_bytes_of_sentencepiece_are_kept(sentencepiece, text):
    ids = []
    for piece in text:
        known = sentencepiece.token_to_id(piece)
        ids += [sentencepiece.token_to_id(f"<0x{b:02X}>") for b in piece.encode()] if known is None else [known]
    deltas, rest = deltas_of(sentencepiece, ids)
    assert "".join(deltas) + rest == sentencepiece.decode(ids)
    assert "\ufffd" not in "".join(deltas)


def test_a_character_cut_off_at_the_end_is_replaced(byte_level):
    bytes_of_smile = [byte_level.token_to_id(piece) for piece in ("ð", "Ł")]
    deltas, rest = deltas_of(byte_level, bytes_of_smile)
    assert deltas == ["", ""]
    assert rest == "\ufffd"


def test_special_tokens_have_no_text(byte_level):
    deltas, rest = deltas_of(byte_level, [1, 2, *byte_level.encode("ab", add_special_tokens=False).ids, 3])
    assert "".join(deltas) + rest == "ab"


def scan(pieces, stop, include=False):
    scanner, out = StopScanner(stop, include=include), []
    for piece in pieces:
        text, found = scanner.add(piece)
        out.append(text)
        if found is not None:
            return out, found
    return [*out, scanner.flush()], None


def portions(text, cuts):
    edges = [0, *sorted({min(cut, len(text)) for cut in cuts}), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(edges)]


@given(
    text=st.text("ab", max_size=20),
    stop=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    cuts=st.lists(st.integers(0, 20), max_size=8),
    include=st.booleans(),
)
@settings(max_examples=500)
def test_the_portions_of_a_text_do_not_matter(text, stop, cuts, include):
    whole = scan(list(text), stop, include)
    cut = scan(portions(text, cuts), stop, include)
    assert ("".join(cut[0]), cut[1]) == ("".join(whole[0]), whole[1])


@given(text=st.text("ab", max_size=20), stop=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3))
@settings(max_examples=500)
def test_the_text_ends_where_a_stop_string_is_first_complete(text, stop):
    ends = [end for end in range(1, len(text) + 1) if any(text[:end].endswith(each) for each in stop)]
    out, found = scan(list(text), stop)
    if not ends:
        assert ("".join(out), found) == (text, None)
    else:
        longest = max((each for each in stop if text[: ends[0]].endswith(each)), key=len)
        assert ("".join(out), found) == (text[: ends[0] - len(longest)], longest)


@given(text=st.text("ab", max_size=20), stop=st.text("ab", min_size=1, max_size=5))
def test_what_is_let_go_is_never_taken_back_and_no_more_than_needed_is_held(text, stop):
    scanner, out = StopScanner([stop], include=False), ""
    for end, character in enumerate(text, 1):
        certain, found = scanner.add(character)
        out += certain
        if found is not None:
            break
        held = text[len(out) : end]
        assert stop.startswith(held)
        assert not any(stop.startswith(text[start:end]) for start in range(len(out)))


@pytest.mark.parametrize(("include", "text"), [(False, "one "), (True, "one STOP")])
def test_the_stop_string_is_part_of_the_text_only_when_asked_for(include, text):
    assert scan(["one S", "TOP two"], ["STOP"], include) == (["one ", text[4:]], "STOP")


def test_a_stop_string_that_ends_too_early_is_text():
    scanner = StopScanner(["ab"], include=False)
    assert scanner.add("xab", may_stop=False) == ("xab", None)
    assert scanner.add("ca", may_stop=False) == ("c", None)
    assert scanner.add("b") == ("", "ab")
