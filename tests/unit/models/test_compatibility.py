"""Which pairs of tokenizers can be distilled, and on which ids."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from leanroll.errors import ModelError
from leanroll.losses.vocabulary import SharedVocabulary
from leanroll.models import Policy
from leanroll.models.compatibility import (
    Compatibility,
    check_compatible,
    compare_tokenizers,
    template_differences,
    unshared_student_ids,
    vocabulary_arguments,
)
from leanroll.models.default import default_model_dir
from tests.tiny import tiny_model, tiny_tokenizer

SIZE = 259
"""Tokens of `tiny_tokenizer`."""
WORDS = tuple(f"w{i}" for i in range(300))
MERGES = (("a", "b"), ("ab", "c"), ("b", "c"))


def word_tokenizer(
    ordinary: Sequence[str] = WORDS, added: Mapping[str, int] | Sequence[str] = ()
) -> PreTrainedTokenizerFast:
    """One token per word, numbered from 0; then the added tokens, numbered on, or with ids of their own."""
    vocab = {token: i for i, token in enumerate(ordinary)}
    if isinstance(added, Mapping):
        # An added token that the model's vocabulary holds keeps its id there.
        vocab |= added
    backend = Tokenizer(models.WordLevel(vocab=vocab, unk_token=None))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in added])
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def merging_tokenizer(
    merges: Sequence[tuple[str, str]] = MERGES,
    *,
    normalizer: Any = None,
    pre_tokenizer: Any = None,
    **options: Any,
) -> PreTrainedTokenizerFast:
    vocab = {token: i for i, token in enumerate(["a", "b", "c", "ab", "abc", "bc"])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=list(merges), **options))
    if normalizer is not None:
        backend.normalizer = normalizer
    if pre_tokenizer is not None:
        backend.pre_tokenizer = pre_tokenizer
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def scored_tokenizer(score: float) -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.Unigram([("<unk>", 0.0), ("a", -1.0), ("b", score)], unk_id=0, byte_fallback=False))
    return PreTrainedTokenizerFast(tokenizer_object=backend)


class SlowTokenizer(PreTrainedTokenizer):
    """In Python, one token per character; letters in pairs if asked to, with the same vocabulary."""

    def __init__(self, *, pairs: bool, reverse: bool = False) -> None:
        letters = [chr(i) for i in range(32, 127)]
        tokens = [*letters, *(a + b for a in "aeiou" for b in "aeiou")]
        self.pairs = pairs
        self.ids = {token: i for i, token in enumerate(reversed(tokens) if reverse else tokens)}
        super().__init__(unk_token=" ")

    @property
    def vocab_size(self) -> int:
        return len(self.ids)

    def get_vocab(self) -> dict[str, int]:
        return dict(self.ids)

    def _tokenize(self, text: str, **_kwargs: Any) -> list[str]:
        out: list[str] = []
        for letter in text:
            if self.pairs and out and out[-1] + letter in self.ids:
                out[-1] += letter
            else:
                out.append(letter)
        return out

    def _convert_token_to_id(self, token: str) -> int:
        return self.ids.get(token, self.ids[" "])

    def _convert_id_to_token(self, index: int) -> str:
        return list(self.ids)[index]


def compare(
    student: PreTrainedTokenizerBase, teacher: PreTrainedTokenizerBase, sizes: tuple[int, int] | None = None
) -> Compatibility:
    return compare_tokenizers(student, teacher, *(sizes or (len(student), len(teacher))))


def policy(
    tokenizer: PreTrainedTokenizerBase | None = None, *, rows: int = SIZE, name: str = "tiny", **overrides: Any
) -> Policy:
    model = tiny_model("llama", vocab_size=rows, num_hidden_layers=1, **overrides)
    return Policy(model, tokenizer or tiny_tokenizer(), name=name)


def extended(*tokens: str) -> PreTrainedTokenizerFast:
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": list(tokens)})
    return tokenizer


def renamed(index: int, name: str) -> PreTrainedTokenizerFast:
    """`tiny_tokenizer` with another special token at an id."""
    plain = tiny_tokenizer()
    names = {i: token for token, i in plain.get_vocab().items()} | {index: name}
    backend = Tokenizer(models.BPE(vocab={token: i for i, token in names.items()}, merges=[]))
    backend.pre_tokenizer = plain.backend_tokenizer.pre_tokenizer
    backend.add_special_tokens([AddedToken(names[i], normalized=False, special=True) for i in range(3)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token=names[0], bos_token=names[1], eos_token=names[2])


@cache
def plain_policy() -> Policy:
    return policy()


def with_template(template: str | None) -> Policy:
    """All of them share one model, which the templates do not touch."""
    out = copy.copy(plain_policy())
    out.tokenizer = tiny_tokenizer()
    if template is None:
        out.tokenizer.chat_template = None
    else:
        out.set_chat_template(template)
    return out


def assert_ids(found: Tensor, expected: Sequence[int]) -> None:
    assert found.dtype == torch.int64
    assert found.tolist() == list(expected)


# Which ids are shared


@pytest.mark.parametrize("sizes", [(SIZE, SIZE), (300, SIZE), (SIZE, 300), (280, 320)])
def test_padding_rows_of_either_head_are_not_shared(sizes: tuple[int, int]) -> None:
    found = compare(tiny_tokenizer(), tiny_tokenizer(), sizes)
    assert found == Compatibility(SIZE, (), ())
    assert_ids(found.ids, range(SIZE))


def test_a_token_without_a_row_in_the_head_is_missing_there() -> None:
    found = compare(tiny_tokenizer(), tiny_tokenizer(), (SIZE, SIZE - 2))
    assert found.shared == SIZE - 2
    assert found.student_only == tuple(tiny_tokenizer().convert_ids_to_tokens([SIZE - 2, SIZE - 1]))
    assert found.teacher_only == ()


def test_tokens_that_one_side_adds() -> None:
    thinking = extended("<think>", "</think>")
    assert compare(tiny_tokenizer(), thinking, (300, 300)) == Compatibility(SIZE, (), ("<think>", "</think>"))
    assert compare(thinking, tiny_tokenizer(), (300, 300)) == Compatibility(SIZE, ("<think>", "</think>"), ())
    # Added, but beyond the rows: as if it was not there.
    assert compare(thinking, tiny_tokenizer(), (SIZE + 1, 300)).student_only == ("<think>",)


def test_added_tokens_that_swap_ids_are_not_shared() -> None:
    first = word_tokenizer(added={"<x>": 300, "<y>": 301, "<z>": 302})
    second = word_tokenizer(added={"<y>": 300, "<x>": 301, "<z>": 302})
    found = compare(first, second)
    assert isinstance(found.shared, tuple)
    for ids in found.shared:
        assert_ids(ids, [*range(300), 302])
    assert (found.student_only, found.teacher_only) == (("<x>", "<y>"), ("<y>", "<x>"))


def test_the_same_tokenizer_object_on_both_sides() -> None:
    tokenizer = tiny_tokenizer()
    assert compare(tokenizer, tokenizer, (300, 300)) == Compatibility(SIZE, (), ())


@given(data=st.data())
def test_shared_ids_are_those_with_one_meaning(data: st.DataObject) -> None:
    """Against what the tokenizers were built from: 200 words, then slots for added tokens that each side fills or leaves empty."""
    slot = st.sampled_from([None, "<p>", "<q>", "<r>", "<s>", "<t>"])
    built: list[dict[int, str]] = []
    for _ in range(2):
        slots = data.draw(
            st.lists(slot, max_size=8).filter(lambda xs: len({x for x in xs if x}) == len([x for x in xs if x]))
        )
        built.append({200 + i: token for i, token in enumerate(slots) if token})
    sizes = [data.draw(st.integers(195, 212)) for _ in range(2)]
    tokenizers = [word_tokenizer(WORDS[:200], {token: i for i, token in tokens.items()}) for tokens in built]
    maps = [
        {i: token for i, token in {**dict(enumerate(WORDS[:200])), **tokens}.items() if i < size}
        for tokens, size in zip(built, sizes, strict=True)
    ]
    shared = [i for i in sorted(maps[0]) if maps[0][i] == maps[1].get(i)]
    common = maps[0].keys() & maps[1].keys()
    # Words that one head has no row for are ordinary tokens on one side alone.
    alone = [i for i in maps[0].keys() ^ maps[1].keys() if i < 200]
    if len(common) - len(shared) + len(alone) > 0.01 * len(common):
        with pytest.raises(ModelError, match="more than 1%"):
            compare(*tokenizers, sizes=(sizes[0], sizes[1]))
        return
    found = compare(*tokenizers, sizes=(sizes[0], sizes[1]))
    assert_ids(found.ids, shared)
    assert isinstance(found.shared, int) == (shared == list(range(len(shared))))
    for names, tokens in zip((found.student_only, found.teacher_only), maps, strict=True):
        assert names == tuple(tokens[i] for i in sorted(tokens) if i not in shared)


# Which pairs are refused


def refused(student: PreTrainedTokenizerBase, teacher: PreTrainedTokenizerBase, *parts: str) -> None:
    """Both ways round; every message says what to do."""
    for pair in ((student, teacher), (teacher, student)):
        with pytest.raises(ModelError) as error:
            compare(*pair)
        for part in (*parts, "across tokenizers is not supported yet", "teacher of the student's family"):
            assert part in str(error.value)


def test_ordinary_tokens_that_swap_ids() -> None:
    swapped = list(WORDS)
    swapped[7], swapped[9] = swapped[9], swapped[7]
    refused(word_tokenizer(), word_tokenizer(swapped), "id 7 is", "'w7'", "'w9'")


def test_an_added_token_in_place_of_an_ordinary_one() -> None:
    refused(
        word_tokenizer([*WORDS, "last"]), word_tokenizer(WORDS, {"<x>": len(WORDS)}), "id 300 is", "'last'", "'<x>'"
    )


def test_too_many_different_added_tokens() -> None:
    def tokenizer(kind: str, count: int) -> PreTrainedTokenizerFast:
        return word_tokenizer(added=[f"<{kind}{i}>" for i in range(count)])

    # 3 of 303 is within 1 %, 4 of 304 is not.
    assert compare(tokenizer("a", 3), tokenizer("b", 3)).shared == 300
    refused(tokenizer("a", 4), tokenizer("b", 4), "4 ids name different added tokens", "id 300", "'<a0>'", "'<b0>'")
    # Any number of them on one side alone.
    assert compare(tokenizer("a", 50), tokenizer("a", 0)).shared == 300


def test_ordinary_tokens_on_one_side_alone() -> None:
    assert compare(word_tokenizer(WORDS), word_tokenizer(WORDS[:298])) == Compatibility(298, ("w298", "w299"), ())
    refused(
        word_tokenizer(WORDS), word_tokenizer(WORDS[:296]), "4 an ordinary token on one side alone", "'w296'", "nothing"
    )


def test_nothing_in_common() -> None:
    with pytest.raises(ModelError, match="no id names a token on both sides"):
        compare_tokenizers(word_tokenizer([], ["<x>"]), word_tokenizer([], {"<y>": 5}), 10, 10)


@pytest.mark.parametrize(
    ("other", "parts"),
    [
        (merging_tokenizer(MERGES[:2]), ("merges[2] is", "'b c'", "nothing")),
        (merging_tokenizer((MERGES[2], *MERGES[:2])), ("merges[0] is", "'a b'", "'b c'")),
        (merging_tokenizer(normalizer=normalizers.NFC()), ("normalizer is", "NFC", "nothing")),
        (merging_tokenizer(pre_tokenizer=pre_tokenizers.Whitespace()), ("pre_tokenizer is", "Whitespace")),
        (merging_tokenizer(ignore_merges=True), ("model.ignore_merges is", "True")),
        (word_tokenizer(["a", "b", "c", "ab", "abc", "bc"]), ("model.type is", "'BPE'", "'WordLevel'")),
    ],
    ids=["fewer merges", "order of merges", "normaliser", "pre-tokeniser", "option", "kind"],
)
def test_text_that_is_split_in_another_way(other: PreTrainedTokenizerBase, parts: tuple[str, ...]) -> None:
    refused(merging_tokenizer(), other, *parts)


def test_a_difference_inside_a_sequence_is_named() -> None:
    def tokenizer(*steps: Any) -> PreTrainedTokenizerFast:
        return merging_tokenizer(normalizer=normalizers.Sequence(list(steps)))

    nfc, nfkc, strip = normalizers.NFC(), normalizers.NFKC(), normalizers.Strip()
    refused(tokenizer(strip, nfc), tokenizer(strip, nfkc), "normalizer[1].type is", "'NFC'", "'NFKC'")


def test_unigram_scores() -> None:
    assert compare(scored_tokenizer(-2.0), scored_tokenizer(-2.0)).shared == 3
    refused(scored_tokenizer(-2.0), scored_tokenizer(-0.5), "the score of 'b' is", "-2.0", "-0.5")


@pytest.mark.parametrize(
    "other",
    [
        merging_tokenizer(normalizer=normalizers.Sequence([])),
        merging_tokenizer(continuing_subword_prefix="", end_of_word_suffix=""),
    ],
    ids=["empty sequence", "empty affixes"],
)
def test_spellings_of_nothing_are_the_same(other: PreTrainedTokenizerBase) -> None:
    assert compare(merging_tokenizer(), other).shared == 6
    assert compare(other, merging_tokenizer()).shared == 6


def test_offsets_and_sequences_of_one_make_no_difference() -> None:
    level = pre_tokenizers.ByteLevel
    plain = merging_tokenizer(pre_tokenizer=level(add_prefix_space=False, trim_offsets=True))
    same = level(add_prefix_space=False, trim_offsets=False)
    assert compare(plain, merging_tokenizer(pre_tokenizer=pre_tokenizers.Sequence([same]))).shared == 6
    refused(plain, merging_tokenizer(pre_tokenizer=level(add_prefix_space=True)), "pre_tokenizer.add_prefix_space is")


def test_tokenizers_that_cannot_be_serialised_are_compared_by_what_they_do() -> None:
    slow = SlowTokenizer(pairs=False)
    assert compare(slow, SlowTokenizer(pairs=False), (120, 130)).shared == 120
    refused(slow, SlowTokenizer(pairs=True), "the encoding of")
    refused(slow, SlowTokenizer(pairs=False, reverse=True), "id 0 is")


def test_a_fast_and_a_slow_tokenizer() -> None:
    slow = SlowTokenizer(pairs=False)

    def fast(*, lowercase: bool) -> PreTrainedTokenizerFast:
        backend = Tokenizer(models.WordLevel(vocab=slow.get_vocab(), unk_token=" "))
        backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
        if lowercase:
            backend.normalizer = normalizers.Lowercase()
        backend.add_special_tokens([AddedToken(" ", normalized=False, special=True)])
        return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token=" ")

    assert compare(slow, fast(lowercase=False)).shared == len(slow)
    refused(slow, fast(lowercase=True), "the encoding of")


def test_default_model() -> None:
    tokenizer = AutoTokenizer.from_pretrained(default_model_dir())
    thinking = copy.deepcopy(tokenizer)
    thinking.add_tokens(["<think>", "</think>"])
    rows = len(tokenizer)
    assert compare(tokenizer, thinking, (rows, rows + 64)) == Compatibility(rows, (), ("<think>", "</think>"))
    refused(tokenizer, tiny_tokenizer(), "id 3 is", "'<repo_name>'", "'!'")


# Pairs of policies


def test_policies_are_compared_within_their_heads() -> None:
    student, teacher = policy(rows=SIZE + 1), policy(extended("<think>", "<more>"), rows=SIZE + 5)
    found = check_compatible(student, teacher)
    assert found == Compatibility(SIZE, (), ("<think>", "<more>"))
    assert_ids(unshared_student_ids(student, found, eos_class=True), [SIZE])
    back = check_compatible(teacher, student)
    assert_ids(unshared_student_ids(teacher, back, eos_class=True), range(SIZE, SIZE + 5))


@pytest.mark.parametrize("eos_class", [False, True])
def test_arguments_fit_the_shared_vocabulary(eos_class: bool) -> None:
    student, teacher = policy(rows=SIZE + 3), policy(rows=SIZE + 5, eos_token_id=1)
    arguments = vocabulary_arguments(student, teacher, check_compatible(student, teacher), eos_class=eos_class)
    vocabulary = SharedVocabulary.of(**arguments, device="cpu")
    assert (vocabulary.student.size, vocabulary.teacher.size) == (SIZE + 3, SIZE + 5)
    assert_ids(vocabulary.student.dropped, range(SIZE, SIZE + 3))
    assert_ids(vocabulary.teacher.dropped, range(SIZE, SIZE + 5))
    # The student's own stop is 2, the teacher's are 1 and 2.
    assert sorted(vocabulary.student.stops.tolist()) == ([1, 2] if eos_class else [])


def test_arguments_with_single_ids_that_differ() -> None:
    student, teacher = policy(renamed(2, "<|stop|>")), plain_policy()
    found = check_compatible(student, teacher)
    assert isinstance(found.shared, tuple)
    vocabulary = SharedVocabulary.of(**vocabulary_arguments(student, teacher, found, eos_class=True))
    assert_ids(vocabulary.student.stops, [2])
    assert vocabulary.student.dropped.numel() == 0, "the student's own stop is part of the class"
    apart = SharedVocabulary.of(**vocabulary_arguments(student, teacher, found, eos_class=False))
    assert_ids(apart.student.dropped, [2])


def test_an_own_stop_token_may_be_sampled_with_the_class_only() -> None:
    student, teacher = policy(renamed(2, "<|stop|>"), rows=SIZE + 1), plain_policy()
    found = check_compatible(student, teacher)
    assert_ids(unshared_student_ids(student, found, eos_class=True), [SIZE])
    with pytest.raises(ModelError, match=r"'<\|stop\|>'.*Turn eos_class on"):
        unshared_student_ids(student, found, eos_class=False)


def test_an_unshared_token_that_does_not_stop_is_masked() -> None:
    student = policy(renamed(0, "<|other|>"))
    found = check_compatible(student, plain_policy())
    for eos_class in (False, True):
        assert_ids(unshared_student_ids(student, found, eos_class=eos_class), [0])


def test_a_stop_id_beyond_the_head_is_left_out() -> None:
    student, teacher = policy(eos_token_id=[2, SIZE + 9]), plain_policy()
    found = check_compatible(student, teacher)
    assert vocabulary_arguments(student, teacher, found, eos_class=True)["eos_class"] == ([2], [2])
    assert unshared_student_ids(student, found, eos_class=True).numel() == 0


# Templates

PLAIN = str(tiny_tokenizer().chat_template)
REFUSING = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + PLAIN
DROPPING = PLAIN.replace("for message in messages", "for message in messages if message['role'] != 'system'")
THINKING = PLAIN.replace("assistant\n' }}", "assistant\n<think>\n' }}")
DEFAULTING = "{% if messages[0]['role'] != 'system' %}<|start|>system\nYou are T.<|end|>\n{% endif %}" + PLAIN


def test_no_differences() -> None:
    assert template_differences(with_template(PLAIN), policy(rows=300)) == []


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (REFUSING, ["The teacher's chat template refuses a conversation of system + user: no system role."]),
        (
            DROPPING,
            [
                "The teacher's chat template leaves out or changes the system message.",
                "A conversation of system + user differs from character 9: the student has '<|start|>system\\nBe brief",
            ],
        ),
        (
            THINKING,
            ["The generation prompt differs from character 19: the student has 'assistant\\n'"],
        ),
        (DEFAULTING, ["A conversation of user differs from character 9: the student has '<|start|>user"]),
        (None, ["The teacher has no chat template"]),
    ],
    ids=["refuses", "drops", "thinks", "defaults", "none"],
)
def test_differences_of_templates(template: str | None, expected: list[str]) -> None:
    found = template_differences(with_template(PLAIN), with_template(template))
    assert len(found) == len(expected), found
    for sentence, start in zip(found, expected, strict=True):
        assert sentence.startswith(start)
    # The other way round it is the student's.
    swapped = template_differences(with_template(template), with_template(PLAIN))
    assert len(swapped) == len(expected)
    assert all(("The student" in one) == ("The teacher" in other) for one, other in zip(swapped, found, strict=True))


def test_both_templates_refuse() -> None:
    found = template_differences(with_template(REFUSING), with_template(REFUSING))
    assert [sentence.split(" refuses")[0] for sentence in found] == [
        "The student's chat template",
        "The teacher's chat template",
    ]
    assert template_differences(with_template("{{ raise_exception('x') }}"), with_template(PLAIN)) == [
        "The student's chat template refuses a conversation of user: x.",
        "The student's chat template refuses a conversation of system + user: x.",
    ]


def test_think_prefix_is_pointed_out_on_its_side() -> None:
    (found,) = template_differences(with_template(PLAIN), with_template(THINKING))
    assert "<think>" in found
    assert found.endswith("Only the teacher's has a think prefix.")
    (found,) = template_differences(with_template(THINKING), with_template(PLAIN))
    assert found.endswith("Only the student's has a think prefix.")
    longer = THINKING.replace("<think>\n", "<think>\nWell, ")
    (found,) = template_differences(with_template(THINKING), with_template(longer))
    assert "Only the" not in found


def test_stop_tokens() -> None:
    (found,) = template_differences(with_template(PLAIN), policy(eos_token_id=[0, 2]))
    assert found == "Stop tokens: the student has 2 '<|end|>', the teacher 0 '<|pad|>', 2 '<|end|>'."
    # The same id, another token.
    other = policy(renamed(2, "<|stop|>"))
    assert template_differences(plain_policy(), other)[0] == (
        "Stop tokens: the student has 2 '<|end|>', the teacher 2 '<|stop|>'."
    )


def test_bos() -> None:
    # Without the leading token of a turn, which is the tiny tokenizer's BOS.
    bare = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '<|end|>' }}{% endfor %}"
    with_bos = "{{ bos_token }}" + bare
    found = template_differences(with_template(bare), with_template(with_bos))
    assert found[-1] == "Only the teacher's encoded chat starts with a BOS token ('<|start|>')."
    assert [sentence.split(" differs")[0] for sentence in found[:-1]] == [
        "A conversation of user",
        "A conversation of system + user",
    ]
    assert template_differences(with_template(with_bos), with_template(with_bos)) == []
