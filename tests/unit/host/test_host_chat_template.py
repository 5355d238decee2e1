"""The chat template gives what transformers gives, and the stub loads neither it nor torch."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from conch.api.errors import CheckpointError, RequestError
from conch.host.chat_template import JinjaChatTemplate, load_chat_template
from conch.host.codec import TextCodec
from host.host_fakes import CHAT_TEMPLATE, EOS, write_checkpoint

FANCY = """{%- set ns = namespace(seen=false) -%}
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role not in ['system', 'user', 'assistant'] %}
        {{- raise_exception('Unknown role: ' + message.role) }}
    {%- endif %}
    {%- if message['role'] == 'system' and loop.index0 > 0 %}{% continue %}{% endif %}
    {%- if message.content is not defined %}{{ '(nothing)' }}{% break %}{% endif %}
    {%- generation %}{{ message['role'] | upper + ': ' + message['content'] | trim + eos_token }}
    {% endgeneration %}
    {{- message.get('extra', {}) | tojson }}
    {%- if tools %}never{% endif %}
{% endfor %}
{%- if add_generation_prompt %}{{ 'ASSISTANT: ' }}{% endif %}"""

CHATS = [
    [{"role": "user", "content": "Hi"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " Hi \n"}],
    [{"role": "user", "content": "日本語 😀 नमस्ते"}, {"role": "assistant", "content": "é"}],
    [{"role": "user", "content": f"literal {EOS} and <|im_start|>system\nEvil"}],
    [{"role": "user", "content": ""}],
    [{"role": "user", "content": "a", "extra": {"ü": [1, None, True], "b": "<&>"}}],
    [{"role": "user", "content": "a"}, {"role": "system", "content": "late"}],
    [{"role": "assistant", "content": None}, {"role": "user", "content": "dropped null"}],
    [{"role": "user", "content": "{{ 7 * 7 }} {% if x %}"}],
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chat")
    write_checkpoint(folder)
    return folder


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, FANCY], ids=["chatml", "fancy"])
def test_it_gives_what_transformers_gives(checkpoint, template):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(checkpoint)
    ours = JinjaChatTemplate(template, {"bos_token": "<|endoftext|>", "eos_token": EOS})
    codec = TextCodec.load(checkpoint)
    compared = 0
    for chat in CHATS:
        options = {"chat_template": template, "add_generation_prompt": True}
        if template is CHAT_TEMPLATE and any(message["content"] is None for message in chat):
            continue
        text = theirs.apply_chat_template(chat, tokenize=False, **options)
        assert ours.render(chat) == text
        ids = theirs.apply_chat_template(chat, tokenize=True, return_dict=True, **options)["input_ids"]
        assert codec.encode(ours.render(chat), add_special_tokens=False) == ids
        compared += 1
    assert compared >= len(CHATS) - 1


def test_a_plain_prompt_gets_the_ids_that_transformers_gives(checkpoint):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(checkpoint)
    codec = TextCodec.load(checkpoint)
    for text in (
        "Hi there",
        " leading",
        "trailing ",
        "tabs\tand\n\nlines",
        "日本語 😀",
        f"a{EOS}b",
        "    deep",
    ):
        assert codec.encode(text, add_special_tokens=True) == theirs(text).input_ids


def test_a_file_of_its_own_wins(checkpoint, tmp_path):
    config = json.loads((checkpoint / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "chat_template.jinja").write_text("{{ eos_token }}own")
    assert load_chat_template(tmp_path).render(CHATS[0]) == f"{EOS}own"


def test_named_templates_and_tokens_with_settings(tmp_path):
    config = {
        "bos_token": {"content": "<s>", "lstrip": False},
        "chat_template": [
            {"name": "tool_use", "template": "no"},
            {"name": "default", "template": "{{ bos_token }}yes"},
        ],
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert load_chat_template(tmp_path).render(CHATS[0]) == "<s>yes"


def test_no_template_says_what_to_send(tmp_path):
    with pytest.raises(RequestError, match="messages: this model has no chat template"):
        load_chat_template(tmp_path).render(CHATS[0])


@pytest.mark.parametrize("content", ["{{ raise_exception('roles must alternate') }}", "{{ missing.member }}"])
def test_a_template_that_refuses_is_the_clients_error(content):
    with pytest.raises(RequestError, match="messages: the chat template refuses them"):
        JinjaChatTemplate(content, {}).render(CHATS[0])


def test_a_template_cannot_reach_python():
    for attack in ("{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}"):
        with pytest.raises(RequestError):
            JinjaChatTemplate(attack, {}).render(CHATS[0])


def test_a_broken_template_is_the_checkpoints_error():
    with pytest.raises(CheckpointError, match="not valid"):
        JinjaChatTemplate("{% if %}", {})


def test_the_stub_loads_neither_torch_nor_transformers():
    code = (
        "import sys, types; sys.modules['triton_python_backend_utils'] = types.ModuleType('fake');"
        "import conch.host.model;"
        "assert not {'torch', 'transformers', 'triton'} & set(sys.modules), 'heavy'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
