"""SmolLM2-135M from its wheel: text as transformers writes it, through capsules and grammars."""

from __future__ import annotations

import io
import json

import jinja2
import pytest
import torch
from transformers import LlamaConfig as TheirConfig
from transformers import LlamaForCausalLM

from flashrt_core.capsule import CapsuleStore
from flashrt_core.planners import GrammarSource
from flashrt_core.planners import make_planner
from flashrt_core.planners import Options
from flashrt_core.planners.chat import Chat
from flashrt_core.planners.chat import SYSTEM
from flashrt_core.planners.llama.gguf import open_gguf
from flashrt_core.planners.llama.gguf import SMOLLM2
from flashrt_core.runtime import cpu_backend

pytestmark = pytest.mark.slow

QUESTION = 'What is the capital of France?'
TOKENS = 24


@pytest.fixture(scope='module')
def chat():
    session = make_planner('llama').bind(cpu_backend(), {
        'base': SMOLLM2, 'context': 256, 'prefill_keys': [64], 'ridge': 64,
        'smallest_span': 256})
    chat = Chat(session, CapsuleStore(cpu_backend(), 64 << 20, 64 << 20))
    chat.begin(SYSTEM)
    yield chat
    session.close()


def prompt(chat):
    return chat.form.message('system', SYSTEM) + chat.form.ask(QUESTION)


def ask(chat, question=QUESTION, **options):
    chat.restore()
    out = io.StringIO()
    answer = chat.ask(question, Options(**{'max_tokens': TOKENS, **options}), out)
    assert out.getvalue() == answer.text + '\n'
    return answer


def test_greedy_tokens_are_those_of_transformers_on_the_same_weights(chat):
    c = chat.session.config
    with torch.device('meta'):
        theirs = LlamaForCausalLM(TheirConfig(
            vocab_size=c.vocab, hidden_size=c.width, intermediate_size=c.mlp,
            num_hidden_layers=c.layers, num_attention_heads=c.heads,
            num_key_value_heads=c.kv_heads, rms_norm_eps=c.eps, tie_word_embeddings=True,
            rope_parameters={'rope_type': 'default', 'rope_theta': c.rope_theta})).eval()
    with open_gguf(SMOLLM2) as reader:
        weights = {f'model.{name}': reader.read(name) for name in reader.shapes}
    theirs.load_state_dict(weights, strict=False, assign=True)
    theirs.tie_weights()
    # The table of rope is no weight, so the meta device left it empty.
    theirs.model.rotary_emb = type(theirs.model.rotary_emb)(theirs.config)
    tokens = chat.form.message('system', SYSTEM) + chat.form.ask('Tell me about the sea.')
    chat.session.prefill(tokens).result()
    mine = [token.id for token in chat.session.stream(Options(max_tokens=TOKENS))]
    assert len(mine) == TOKENS
    # One pass over prompt and answer: each token is the best one after those before it.
    with torch.no_grad():
        logits = theirs(torch.tensor([tokens + mine])).logits[0]
    assert mine == logits[len(tokens) - 1 : -1].argmax(-1).tolist()


def test_the_ids_of_a_chat_are_those_of_the_files_own_template(chat):
    with open_gguf(SMOLLM2) as reader:
        template = reader.fields['tokenizer.chat_template']
    messages = [{'role': 'system', 'content': SYSTEM}, {'role': 'user', 'content': QUESTION}]
    text = jinja2.Environment().from_string(template).render(
        messages=messages, add_generation_prompt=True)
    assert prompt(chat) == chat.tokenizer.encode(text, special=True)


def test_an_answer_is_right_ends_by_its_marker_and_repeats_after_a_restore(chat):
    first = ask(chat)
    assert first.text == 'The capital of France is Paris.' and first.reason == 'stop token'
    other = ask(chat, 'Name a colour.')
    assert other.text != first.text
    assert ask(chat).text == first.text


def test_a_drawn_answer_repeats_with_its_seed_and_differs_with_another(chat):
    options = {'temperature': 1.5, 'top_p': 0.95, 'max_tokens': 10}
    answers = [ask(chat, 'Tell a story.', seed=seed, **options).text for seed in (1, 2, 1)]
    assert answers[0] == answers[2] != answers[1]


def test_a_stop_text_ends_an_answer_before_it(chat):
    answer = ask(chat, stop=(' of France',))
    assert (answer.text, answer.reason) == ('The capital', 'stop text')


def test_an_answer_under_a_schema_is_json_of_that_schema(chat):
    schema = {'type': 'object', 'additionalProperties': False, 'required': ['verb', 'object'],
              'properties': {'verb': {'enum': ['pick', 'place']},
                             'object': {'enum': ['red block', 'blue block']}}}
    grammar = GrammarSource('json', json.dumps(schema))
    answer = ask(chat, 'Pick up the blue block.', grammar=grammar, max_tokens=40)
    record = json.loads(answer.text)
    assert record['verb'] in ('pick', 'place') and record['object'].endswith('block')


def test_a_stream_cancelled_and_gone_on_with_gives_the_text_of_one_that_was_not(chat):
    whole = ask(chat, 'Count from one to nine.', max_tokens=16)
    chat.restore()
    chat.session.append(chat.form.ask('Count from one to nine.')).result()
    given = []
    stream = chat.session.stream(Options(max_tokens=16))
    for token in stream:
        given.append(token)
        if len(given) == 6:
            stream.cancel()
    assert stream.reason == 'cancelled' and len(given) == 6
    rest = chat.session.stream(Options(max_tokens=16 - 6), before=[t.id for t in given])
    text = ''.join(t.text for t in given) + ''.join(t.text for t in rest) + rest.rest
    assert text == whole.text
