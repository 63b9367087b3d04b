"""The chat command: what it prints, that questions are independent, that misuse is told."""

from __future__ import annotations

import io
import json
import re

from _llama import save_gguf
from _llama import their_model
import pytest

from flashrt_core.planners import chat


@pytest.fixture(scope='module')
def model(tmp_path_factory):
    return save_gguf(tmp_path_factory.mktemp('chat') / 'tiny.gguf', their_model('grouped'))


def run(capsys, *arguments):
    code = chat.main([*arguments, '--cpu-threads', '1', '--device', 'cpu'])
    out, err = capsys.readouterr()
    return code, out, err


def test_every_question_is_answered_from_the_restored_system_prompt(model, capsys):
    code, out, err = run(
        capsys, '--model', model, '--system', 'Plan.', '--regex', '[a-z]{12}', '--context', '128',
        '--temperature', '3', '--prompt', 'one', '--prompt', 'seven', '--prompt', 'one')
    assert code == 0
    answers = re.split(r'^> .*\n', out, flags=re.MULTILINE)[1:]
    assert len(answers) == 3 and answers[0] == answers[2] != answers[1]
    assert err.count('restored the system prompt') == 2 and err.count('bit-exact: yes') == 2
    assert err.count('tokens/s') == 3 and 'kept as a capsule of' in err


def test_questions_come_from_the_standard_input_where_none_is_given(model, capsys, monkeypatch):
    monkeypatch.setattr('sys.stdin', iter(['one\n', '\n', ' two \n']))
    code, out, _ = run(capsys, '--model', model, '--max-tokens', '2', '--context', '128',
                       '--system', 'Plan.')
    assert code == 0 and re.findall('^> (.*)$', out, re.MULTILINE) == ['one', 'two']


def test_an_answer_keeps_to_a_grammar_given_as_text_or_file(model, capsys, tmp_path):
    file = tmp_path / 'schema.json'
    file.write_text(json.dumps({'enum': ['ab', 'cd']}))
    for given in (['--regex', '"(ab|cd)"'], ['--json', f'@{file}']):
        code, out, _ = run(capsys, '--model', model, '--context', '128', '--system', 'Plan.',
                           '--prompt', 'one', *given)
        assert code == 0 and out.splitlines()[1] in ('"ab"', '"cd"')


@pytest.mark.parametrize('arguments, what', [
    (['--model', 'none.gguf'], 'cannot be read'),
    (['--model', 'gpt'], "planner 'gpt' is none of tiny, smollm2"),
    (['--model', 'none.yaml'], 'is neither a file nor one of'),
    (['--model', 'tiny'], 'names no tokenizer'),
    (['--planner', 'bert'], "planner 'bert' is unknown"),
    (['--temperature', '-1'], 'temperature is -1.0; give'),
    (['--top-p', '0'], 'top_p is 0.0; give'),
    (['--regex', '('], "grammar '--regex' is no regular expression"),
    (['--regex', 'a', '--lark', 'b'], '--regex and --lark are given; give one'),
    (['--json', '@none.json'], "grammar file 'none.json' cannot be read"),
])
def test_misuse_is_told_in_a_sentence(capsys, arguments, what):
    code, _, err = run(capsys, '--prompt', 'x', *arguments)
    last = err.strip().splitlines()[-1]
    assert code == 1 and last.startswith('chat: ') and what in last
    assert 'Traceback' not in err


def test_an_input_that_is_no_text_is_told_in_a_sentence(model, capsys, monkeypatch):
    monkeypatch.setattr('sys.stdin', io.TextIOWrapper(io.BytesIO(b'\xff\xfe\n'), 'utf-8'))
    code, _, err = run(capsys, '--model', model)
    assert code == 1 and 'give questions in utf-8 [config_invalid]' in err
    assert 'Traceback' not in err


def test_a_question_longer_than_the_context_is_told_and_the_state_is_usable(model, capsys):
    code, _, err = run(capsys, '--model', model, '--context', '64', '--system', 'Plan.',
                       '--prompt', 'x ' * 80)
    assert code == 1 and '[prompt_too_long]' in err


def test_an_unknown_flag_is_answered_with_the_usage(capsys):
    with pytest.raises(SystemExit) as stop:
        chat.main(['--nonsense'])
    assert stop.value.code == 2 and 'usage: python -m flashrt_core.planners.chat' in (
        capsys.readouterr().err)


def test_a_model_finds_the_files_that_lie_beside_its_config(capsys, tmp_path):
    (tmp_path / 'mine.yaml').write_text('base: tiny\nweights: mine.safetensors\n')
    assert chat.main(['--model', str(tmp_path / 'mine.yaml'), '--prompt', 'hi', '--device', 'cpu',
                 '--planner', 'qwen3_5']) == 1
    assert str(tmp_path / 'mine.safetensors') in capsys.readouterr().err
