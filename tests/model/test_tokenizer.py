"""The tokenizer of a folder equals transformers' AutoTokenizer on it; what it cannot do, it says."""

import json

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from support.checkpoints import make_llama
from support.tokenizers import BOS, EOS, write_tokenizer
from tokenizers import decoders, models, pre_tokenizers, processors
from transformers import AutoTokenizer

from raysonar.errors import InvalidRequestError, ModelFolderError
from raysonar.model.folder import open_folder
from raysonar.model.tokenizer import Tokenizer

TEXTS = [
    "",
    " ",
    "The capital of France is Paris.",
    "  two  spaces\n\nand lines\t",
    "naïve 東京 привет 🙂🙃👩‍👩‍👧",
    f"a special token in the text: {EOS} and <|user|>",
    "\x00\x7f\u2028",
]
CHAT = [
    {"role": "system", "content": "Be brief. "},
    {"role": "user", "content": " What is the capital of Peru?\n"},
    {"role": "assistant", "content": "Lima."},
    {"role": "user", "content": 'And of "Norway" <b>?'},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def ours(folder):
    return Tokenizer.from_folder(open_folder(folder))


@pytest.fixture(scope="module")
def theirs(folder):
    return AutoTokenizer.from_pretrained(folder)


def rewrite(folder, file="tokenizer_config.json", **changes):
    """The folder's JSON file with some keys changed; None removes one."""
    values = json.loads((folder / file).read_text()) | changes
    (folder / file).write_text(json.dumps({key: value for key, value in values.items() if value is not None}))


@pytest.mark.parametrize("text", TEXTS)
def test_encoding_and_decoding_equal_transformers(ours, theirs, text):
    for special in (True, False):
        ids = ours.encode(text, add_special_tokens=special)
        assert ids == theirs.encode(text, add_special_tokens=special)
        for skip in (True, False):
            assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)
    assert ours.encode(text)[0] == ours.bos_token_id == theirs.bos_token_id


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
@settings(max_examples=150, deadline=None)
def test_any_text_survives_the_round_trip_and_its_tokens_spell_its_bytes(ours, theirs, text):
    ids = ours.encode(text, add_special_tokens=False)
    assert ids == theirs.encode(text, add_special_tokens=False)
    assert b"".join(map(ours.token_bytes, ids)) == text.encode()
    assert ours.decode(ids, skip_special_tokens=False) == text


@given(st.lists(st.integers(0, 383), max_size=12))
@settings(max_examples=150, deadline=None)
def test_any_ids_decode_as_in_transformers(ours, theirs, ids):
    for skip in (True, False):
        assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)


CONFIGS = [{}, {"add_bos_token": False}, {"add_bos_token": True}, {"add_bos_token": False, "add_eos_token": True}]


@pytest.mark.parametrize("config", CONFIGS)
def test_special_tokens_that_the_file_adds_are_kept_as_in_transformers(tmp_path, config):
    folder = make_llama(tmp_path)
    rewrite(folder, **config)
    ours, theirs = Tokenizer.from_folder(open_folder(folder)), AutoTokenizer.from_pretrained(folder)
    assert ours.encode("The Nile") == theirs.encode("The Nile")
    assert ours.encode("The Nile")[0] == ours.bos_token_id


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("byte_level", [True, False])
def test_where_the_file_adds_none_the_configuration_decides(tmp_path, config, byte_level):
    """As published with DeepSeek V2 and V3. transformers 5 ignores the two keys: the pinned difference is theirs."""
    folder = make_llama(tmp_path, tokenizer=False)
    write_tokenizer(folder, add_bos=False)
    if byte_level:
        model = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        model.post_processor = processors.ByteLevel(trim_offsets=False)
        model.save(str(folder / "tokenizer.json"))
    tokens = {
        name: {"__type": "AddedToken", "content": text, "lstrip": False, "normalized": True, "rstrip": False}
        for name, text in (("bos_token", BOS), ("eos_token", EOS), ("pad_token", EOS))
    }
    rewrite(folder, **tokens, tokenizer_class="LlamaTokenizerFast", **config)
    ours, theirs = Tokenizer.from_folder(open_folder(folder)), AutoTokenizer.from_pretrained(folder)
    before = [0] if config.get("add_bos_token") else []
    after = [1] if config.get("add_eos_token") else []
    for text in TEXTS:
        plain = theirs.encode(text)
        assert ours.encode(text) == before + plain + after
        assert ours.encode(text, add_special_tokens=False) == plain
    assert ours.eos_token_ids == (1,)


def test_truncation_and_padding_baked_into_the_file_do_not_apply(tmp_path):
    folder = make_llama(tmp_path)
    baked = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    baked.enable_truncation(4)
    baked.enable_padding(length=32)
    baked.save(str(folder / "tokenizer.json"))
    ours, theirs = Tokenizer.from_folder(open_folder(folder)), AutoTokenizer.from_pretrained(folder)
    text = "The capital of France is Paris."
    assert ours.encode(text) == theirs.encode(text)
    assert 4 < len(ours.encode(text)) < 32


def test_a_sentencepiece_like_vocabulary_spells_its_bytes(tmp_path):
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    vocab |= {piece: 259 + at for at, piece in enumerate(["▁", "a", "b", "▁a", "é"])}
    model = tokenizers.Tokenizer(models.BPE(vocab, [("▁", "a")], unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    model.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    model.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    model.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    folder = make_llama(tmp_path, tokenizer=False)
    model.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    ours = Tokenizer.from_folder(open_folder(folder))
    ids = ours.encode("a b é 🙂", add_special_tokens=False)
    assert b"".join(map(ours.token_bytes, ids)).decode() == " a b é 🙂"
    assert ours.decode(ids) == "a b é 🙂"


def test_pieces_that_stand_for_no_bytes_are_their_own_text(tmp_path):
    """As in the tokenizers library: what `decode` shows and `token_bytes` spells is the same for every token."""
    pieces = ["<0xZZ>", "▁odd", "一", "Ġa", "<pad>"]
    for at, decoder in enumerate([decoders.ByteLevel(), decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])]):
        model = tokenizers.Tokenizer(models.BPE({piece: at for at, piece in enumerate(pieces)}, []))
        model.decoder = decoder
        folder = make_llama(tmp_path / str(at), tokenizer=False)
        model.save(str(folder / "tokenizer.json"))
        ours = Tokenizer.from_folder(open_folder(folder))
        spelt = [ours.token_bytes(token).decode() for token in range(len(pieces))]
        shown = [ours.decode([token]) for token in range(len(pieces))]
        assert spelt == [text if isinstance(decoder, decoders.ByteLevel) else text.replace("▁", " ") for text in shown]


def test_pieces_sizes_and_special_tokens(ours, theirs):
    assert ours.vocab_size == len(theirs) <= 384
    for token in (0, 1, 5, ours.vocab_size - 1):
        assert ours.id_to_piece(token) == theirs.convert_ids_to_tokens(token)
    assert [ours.is_special(token) for token in (0, 1, 5)] == [True, True, False]
    assert (ours.id_to_piece(100_000), ours.token_bytes(100_000)) == ("", b"")
    assert (ours.eos_token_id, ours.eos_token_ids) == (1, (1,))


@pytest.mark.parametrize("in_file", [True, False])
@pytest.mark.parametrize("prompted", [True, False])
def test_chats_render_as_in_transformers(tmp_path, in_file, prompted):
    folder = make_llama(tmp_path, tokenizer=False)
    write_tokenizer(folder, template_file=in_file)
    ours, theirs = Tokenizer.from_folder(open_folder(folder)), AutoTokenizer.from_pretrained(folder)
    rendered = ours.render_chat(CHAT, add_generation_prompt=prompted)
    assert rendered == theirs.apply_chat_template(CHAT, add_generation_prompt=prompted, return_dict=False)
    assert rendered.count(0) == 1  # the template's own beginning, and no second one


RICH = """\
{%- set ns = namespace(count=0) %}
{% for message in messages %}
    {%- if message.role == 'tool' %}{% continue %}{% endif %}
    {%- set ns.count = ns.count + 1 %}
{{ ns.count }} {{ message.role }}: {{ message.content }}
{% generation %}{{ message.tool_calls | tojson if message.tool_calls is defined else 'none' }}{% endgeneration %}

{% endfor %}
{% if tools %}{{ tools | tojson(indent=2) }}{% endif %}
{{ bos_token }} {{ strftime_now('%Y') | length }} {{ flavour | default('plain') }} {{ dict(a=1)['a'] }}
"""


def test_the_conventions_of_templates_equal_transformers(tmp_path):
    folder = make_llama(tmp_path, tokenizer=False)
    write_tokenizer(folder, template=RICH)
    ours, theirs = Tokenizer.from_folder(open_folder(folder)), AutoTokenizer.from_pretrained(folder)
    chat = [*CHAT, {"role": "tool", "content": "dropped"}]
    chat.append({"role": "assistant", "content": None, "tool_calls": [{"name": "<f>", "arguments": {"é": 1}}]})
    tools = [{"type": "function", "function": {"name": "f<", "parameters": {}}}]
    for given_tools, extra in ((None, {}), (tools, {"flavour": "sweet"})):
        text = ours.chat_text(chat, tools=given_tools, **extra)
        expected = theirs.apply_chat_template(
            chat, tools=given_tools, add_generation_prompt=True, tokenize=False, **extra
        )
        assert text == expected
        assert "<f>" in text
        assert "dropped" not in text


CALLING = [
    {"role": "user", "content": "How is Lima?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city":  "Lima"}'}}
        ],
    },
    {"role": "tool", "tool_call_id": "1", "content": "Sunny."},
]


@pytest.mark.parametrize(
    "arguments", ["call.function.arguments", "(call.function.arguments | tojson)", "call['function']['arguments']"]
)
def test_arguments_of_calls_are_written_as_the_model_wrote_them(tmp_path, arguments):
    """Some templates take the text, others put it through tojson: neither quotes it again."""
    folder = make_llama(tmp_path)
    rewrite(
        folder, chat_template="{% for call in messages[1].tool_calls %}{{ '<' + " + arguments + " + '>' }}{% endfor %}"
    )
    assert Tokenizer.from_folder(open_folder(folder)).chat_text(CALLING) == '<{"city":  "Lima"}>'


def test_templates_that_tell_calls_by_a_null_content_see_it(tmp_path):
    """As DeepSeek-V3's and R1's own; others have null left out, as in transformers."""
    folder = make_llama(tmp_path)
    for source, text in (
        ("{{ 'calls' if messages[1]['content'] is none else 'words' }}", "calls"),
        ("{{ 'missing' if messages[1].content is not defined else 'there' }}", "missing"),
    ):
        rewrite(folder, chat_template=source)
        assert Tokenizer.from_folder(open_folder(folder)).chat_text(CALLING) == text


def test_the_last_message_can_be_left_open(tmp_path):
    folder = make_llama(tmp_path, tokenizer=False)
    write_tokenizer(folder)
    ours, theirs = Tokenizer.from_folder(open_folder(folder)), AutoTokenizer.from_pretrained(folder)
    chat = [*CHAT[:-1], {"role": "assistant", "content": "the e"}]
    text = ours.chat_text(chat, continue_final_message=True)
    assert text.endswith("<|assistant|>the e")
    assert text == theirs.apply_chat_template(chat, continue_final_message=True, tokenize=False)
    rewrite(folder, chat_template="{{ messages[0].content }}")
    with pytest.raises(InvalidRequestError, match="leaves the last message out"):
        Tokenizer.from_folder(open_folder(folder)).chat_text(chat, continue_final_message=True)


def test_templates_that_write_tools_are_known(tmp_path):
    folder = make_llama(tmp_path)
    for source, knows in (("{{ tools | tojson }}", True), ("{{ messages }}", False), ("{% set tools = 1 %}", False)):
        rewrite(folder, chat_template=source)
        assert Tokenizer.from_folder(open_folder(folder)).knows_tools is knows


def test_named_templates_are_chosen_by_tools(tmp_path):
    folder = make_llama(tmp_path)
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    rewrite(folder, chat_template=named)
    ours = Tokenizer.from_folder(open_folder(folder))
    assert ours.chat_text(CHAT) == "plain"
    assert ours.chat_text(CHAT, tools=[{"type": "function"}]) == "tools"


def test_text_parts_are_joined(ours):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert ours.render_chat([{"role": "user", "content": parts}]) == ours.render_chat(
        [{"role": "user", "content": "a\nb"}]
    )


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([], "at least one message"),
        ([{"content": "x"}], r"messages\[0\]: expected an object with a role"),
        (["x"], r"messages\[0\]: expected an object with a role"),
        ([{"role": "user", "content": 3}], r"messages\[0\].content: expected a text, found 3"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "only parts of type text"),
        ([{"role": "robot", "content": "x"}], "role robot is not known here"),
    ],
)
def test_bad_messages_are_refused_by_field(ours, messages, says):
    with pytest.raises(InvalidRequestError, match=says) as raised:
        ours.render_chat(messages)
    assert raised.value.field == "messages"


def test_a_template_that_fails_on_the_messages_is_a_bad_request(tmp_path):
    folder = make_llama(tmp_path)
    rewrite(folder, chat_template="{{ messages[0]['content'] + 1 }}")
    with pytest.raises(InvalidRequestError, match="fails on these messages: TypeError") as raised:
        Tokenizer.from_folder(open_folder(folder)).render_chat(CHAT)
    assert raised.value.field == "messages"


def test_a_template_cannot_reach_python(tmp_path):
    folder = make_llama(tmp_path)
    rewrite(folder, chat_template="{{ ''.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(InvalidRequestError, match="unsafe"):
        Tokenizer.from_folder(open_folder(folder)).render_chat(CHAT)


def test_a_template_that_does_not_compile_is_the_folders_fault(tmp_path):
    folder = make_llama(tmp_path)
    rewrite(folder, chat_template="line one\n{% for %}")
    with pytest.raises(ModelFolderError, match=r"tokenizer_config.json: chat template, line 2"):
        Tokenizer.from_folder(open_folder(folder))
    for source, says in (
        (b"\xff", "expected a text in UTF-8"),
        (b"{{" + b"(" * 5000 + b"1" + b")" * 5000 + b"}}", "chat template: nested too deeply"),
        (b"{{ messages | nope }}", "chat template, line 1: No filter named 'nope'"),
    ):
        (folder / "chat_template.jinja").write_bytes(source)
        with pytest.raises(ModelFolderError, match=f"chat_template.jinja: {says}"):
            Tokenizer.from_folder(open_folder(folder))


def test_without_a_template_chats_are_refused(tmp_path):
    folder = make_llama(tmp_path, tokenizer=False)
    write_tokenizer(folder, template=None)
    ours = Tokenizer.from_folder(open_folder(folder))
    assert not ours.has_chat_template
    with pytest.raises(InvalidRequestError, match="has no chat template") as raised:
        ours.render_chat(CHAT)
    assert raised.value.field == "messages"


def test_a_folder_without_tokenizer_takes_token_ids_only(tmp_path):
    ours = Tokenizer.from_folder(open_folder(make_llama(tmp_path, tokenizer=False)))
    assert not ours.available
    assert (ours.vocab_size, ours.bos_token_id, ours.eos_token_ids) == (0, None, (1,))
    for use in (lambda: ours.encode("x"), lambda: ours.decode([1]), lambda: ours.token_bytes(1)):
        with pytest.raises(InvalidRequestError, match=r"no tokenizer.json: send the prompt as token ids"):
            use()
    with pytest.raises(InvalidRequestError, match="no chat template"):
        ours.render_chat(CHAT)


def test_a_tokenizer_larger_than_the_vocabulary_is_refused(tmp_path):
    folder = make_llama(tmp_path, vocab_size=300, tokenizer=False)
    write_tokenizer(folder, 310)
    with pytest.raises(ModelFolderError, match=r"tokenizer.json: .* expected at most 300 tokens .* found 310"):
        Tokenizer.from_folder(open_folder(folder))


def test_a_broken_tokenizer_file_is_named(tmp_path):
    folder = make_llama(tmp_path)
    (folder / "tokenizer.json").write_text('{"model": 3}')
    with pytest.raises(ModelFolderError, match=r"tokenizer.json: not a tokenizer that can be read"):
        Tokenizer.from_folder(open_folder(folder))


def test_a_special_token_outside_the_vocabulary_is_named(tmp_path):
    folder = make_llama(tmp_path)
    rewrite(folder, eos_token="<|nothing|>")
    with pytest.raises(ModelFolderError, match=r"eos_token: expected a token of tokenizer.json, found '<\|nothing\|>'"):
        Tokenizer.from_folder(open_folder(folder))


def test_lone_surrogates_are_refused(ours):
    with pytest.raises(InvalidRequestError, match="not valid Unicode"):
        ours.encode("a\ud800")


class Counting:
    """A tokenizers.Tokenizer that counts the characters that it encodes."""

    def __init__(self, model):
        self._model, self.characters = model, 0

    def __getattr__(self, name):
        return getattr(self._model, name)

    def encode(self, text, **options):
        self.characters += len(text)
        return self._model.encode(text, **options)


@given(text=st.text(max_size=2000), at_most=st.integers(1, 40))
@settings(deadline=None)
def test_a_text_is_only_refused_when_it_has_more_tokens_than_there_is_room_for(ours, text, at_most):
    ids = ours.encode(text)
    refused = False
    try:
        assert ours.encode(text, at_most=at_most) == ids
    except InvalidRequestError:
        refused = True
    assert not refused or len(ids) > at_most


@pytest.mark.parametrize("piece", ["The quick brown fox. ", "a", "東京", " ", "\n\n"])
def test_a_huge_text_is_refused_for_its_beginning(folder, piece):
    model = Counting(tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")))
    tokenizer = Tokenizer(folder, model, {})
    with pytest.raises(InvalidRequestError, match="more than the 100 tokens"):
        tokenizer.encode(piece * (3_000_000 // len(piece)), at_most=100)
    assert model.characters < 100_000
