"""The native engine against plain forward passes without a cache, on tiny real models."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch

from verl.rollout import SamplingParams
from verl.rollout.native import NativeEngine

VOCAB = 97
PROMPTS = [[5], [11, 12, 13, 14, 15, 16, 17], [40, 41, 42], [7, 7, 7, 7, 7], [90, 3]]
SEEDS = [101, 102, 103, 104, 105]


def engine(model: torch.nn.Module, max_rows: int = 64, vocab_size: int = VOCAB) -> NativeEngine:
    return NativeEngine(model, vocab_size=vocab_size, pad_token_id=0, max_rows=max_rows)


def next_logits(model: torch.nn.Module, ids: Sequence[int]) -> torch.Tensor:
    """Logits after every prefix of `ids`, by one unpadded pass without a cache."""
    was_training = model.training
    model.eval()
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0]
    model.train(was_training)
    return logits.float()


def greedy_without_cache(model: torch.nn.Module, prompt: Sequence[int], n: int) -> list[int]:
    ids = list(prompt)
    for _ in range(n):
        ids.append(int(next_logits(model, ids)[-1].argmax()))
    return ids[len(prompt) :]


def rescored(
    model: torch.nn.Module, prompt: Sequence[int], ids: Sequence[int], temperature: float
) -> list[float]:
    logits = next_logits(model, [*prompt, *ids])[len(prompt) - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(-1, torch.tensor(ids)[:, None]).flatten().tolist()


def make_constant(model: torch.nn.Module, logits: dict[int, float], fill: float = 0.0) -> None:
    """Give a model the same next-token logits in every context: a head that is only a bias."""
    head = torch.nn.Linear(model.config.hidden_size, model.config.vocab_size)
    with torch.no_grad():
        head.weight.zero_()
        head.bias.fill_(fill)
        for token, value in logits.items():
            head.bias[token] = value
    model.lm_head = head


def test_greedy_equals_an_argmax_loop_without_cache(any_model: torch.nn.Module) -> None:
    done = engine(any_model).generate(PROMPTS, SamplingParams(12, temperature=0.0), SEEDS)
    assert [c.ids for c in done] == [greedy_without_cache(any_model, p, 12) for p in PROMPTS]
    for prompt, completion in zip(PROMPTS, done, strict=True):
        assert completion.logprobs == pytest.approx(
            rescored(any_model, prompt, completion.ids, 1.0), abs=1e-4
        )


def test_logprobs_equal_a_full_forward_pass_at_the_same_temperature(
    any_model: torch.nn.Module,
) -> None:
    params = SamplingParams(16, temperature=0.7, top_p=0.9, top_k=40)
    for prompt, completion in zip(
        PROMPTS, engine(any_model).generate(PROMPTS, params, SEEDS), strict=True
    ):
        assert len(completion.ids) == 16
        assert completion.logprobs == pytest.approx(
            rescored(any_model, prompt, completion.ids, 0.7), abs=1e-4
        )


def test_a_sample_depends_on_its_prompt_and_seed_only(any_model: torch.nn.Module) -> None:
    params = SamplingParams(14, stop_token_ids=tuple(range(0, VOCAB, 8)))
    together = engine(any_model).generate(PROMPTS, params, SEEDS)
    # Rows end at different times, so rows leave the batch while others go on.
    assert len({len(c.ids) for c in together}) > 2
    alone = [
        engine(any_model).generate([p], params, [s])[0] for p, s in zip(PROMPTS, SEEDS, strict=True)
    ]
    reversed_order = engine(any_model).generate(PROMPTS[::-1], params, SEEDS[::-1])[::-1]
    small_groups = [engine(any_model, rows).generate(PROMPTS, params, SEEDS) for rows in (1, 2)]
    for other in (alone, reversed_order, *small_groups):
        assert [c.ids for c in other] == [c.ids for c in together]
        assert [c.finish_reason for c in other] == [c.finish_reason for c in together]
        for a, b in zip(other, together, strict=True):
            assert a.logprobs == pytest.approx(b.logprobs, abs=1e-4)


def test_a_row_does_not_notice_that_others_finish_early(llama: torch.nn.Module) -> None:
    long = SamplingParams(14, temperature=1.0)
    free = engine(llama).generate(PROMPTS, long, SEEDS)
    # Tokens that row 1 never draws and that other rows draw third.
    stops = tuple({c.ids[2] for c in free} - set(free[1].ids))
    cut = [i for i, c in enumerate(free) if c.ids[2] in stops]
    assert len(cut) >= 3
    stopped = engine(llama).generate(PROMPTS, SamplingParams(14, stop_token_ids=stops), SEEDS)
    assert stopped[1].ids == free[1].ids
    assert all(len(stopped[i].ids) <= 3 for i in cut)


def test_the_same_prompt_with_other_seeds_gives_other_answers(llama: torch.nn.Module) -> None:
    answers = engine(llama).generate([[5, 6]] * 8, SamplingParams(6), list(range(8)))
    assert len({tuple(c.ids) for c in answers}) > 4


def test_many_prompts_of_many_lengths_are_prefilled_in_several_batches(
    gpt2: torch.nn.Module,
) -> None:
    prompts = [[(3 * i + j) % VOCAB for j in range(1 + 3 * i)] for i in range(16)]
    done = engine(gpt2).generate(prompts, SamplingParams(4, temperature=0.0), range(16))
    assert [c.ids for c in done] == [greedy_without_cache(gpt2, p, 4) for p in prompts]


def test_g07_every_stop_id_of_the_list_ends_a_response(llama: torch.nn.Module) -> None:
    make_constant(llama, {1: 3.0, 2: 3.0}, fill=0.0)
    params = SamplingParams(40, stop_token_ids=(1, 2))
    done = engine(llama).generate([[5]] * 16, params, range(16))
    ended_by = {c.ids[-1] for c in done if c.finish_reason == "stop"}
    assert ended_by == {1, 2}
    assert not any(token in (1, 2) for c in done for token in c.ids[:-1])


def test_g08_the_stop_token_is_part_of_the_response_with_its_own_logprob(
    llama: torch.nn.Module,
) -> None:
    make_constant(llama, {2: math.log(0.01), 7: math.log(0.99)}, fill=-math.inf)
    done = engine(llama).generate([[5]] * 64, SamplingParams(8, stop_token_ids=(2,)), range(64))
    stopped = [c for c in done if c.finish_reason == "stop"]
    assert stopped
    for completion in stopped:
        assert completion.ids[-1] == 2
        assert completion.logprobs[-1] == pytest.approx(-4.60517, abs=1e-5)
        assert completion.logprobs[:-1] == pytest.approx(
            [math.log(0.99)] * (len(completion.ids) - 1), abs=1e-6
        )


def test_g09_a_lone_stop_token_is_a_response(llama: torch.nn.Module) -> None:
    make_constant(llama, {2: 30.0})
    (done,) = engine(llama).generate([[5]], SamplingParams(8, stop_token_ids=(2,)), [0])
    assert (done.ids, done.finish_reason) == ([2], "stop")


def test_g12_a_stop_token_is_ignored_only_on_request(llama: torch.nn.Module) -> None:
    second = (
        engine(llama).generate([[5, 9]], SamplingParams(64 - 2, temperature=0.0), [0])[0].ids[1]
    )
    stop = SamplingParams(62, temperature=0.0, stop_token_ids=(second,))
    (done,) = engine(llama).generate([[5, 9]], stop, [0])
    assert (len(done.ids), done.finish_reason) == (2, "stop")
    ignore = SamplingParams(62, temperature=0.0, stop_token_ids=(second,), ignore_eos=True)
    (done,) = engine(llama).generate([[5, 9]], ignore, [0])
    assert (len(done.ids), done.finish_reason) == (62, "length")


def test_min_tokens_forbids_stopping_and_keeps_the_full_distribution(
    llama: torch.nn.Module,
) -> None:
    make_constant(llama, {2: 5.0})
    params = SamplingParams(8, min_tokens=3, stop_token_ids=(2,))
    for completion in engine(llama).generate([[5]] * 8, params, range(8)):
        assert len(completion.ids) >= 4
        assert 2 not in completion.ids[:3]
        # The other 96 tokens share what e^5 leaves them.
        assert completion.logprobs[0] == pytest.approx(-math.log(96 + math.exp(5.0)), abs=1e-5)


def test_a47_the_finish_reason_is_the_engines_not_the_shapes(llama: torch.nn.Module) -> None:
    greedy = SamplingParams(5, temperature=0.0)
    free = engine(llama).generate(PROMPTS, greedy, SEEDS)
    fifth = free[1].ids[4]
    assert fifth not in free[1].ids[:4]
    stop = SamplingParams(5, temperature=0.0, stop_token_ids=(fifth,))
    full_but_finished = engine(llama).generate(PROMPTS, stop, SEEDS)[1]
    assert (len(full_but_finished.ids), full_but_finished.finish_reason) == (5, "stop")
    short_but_cut = engine(llama).generate(
        PROMPTS, SamplingParams(3, temperature=0.0, stop_token_ids=(fifth,)), SEEDS
    )[1]
    assert (len(short_but_cut.ids), short_but_cut.finish_reason) == (3, "length")


def test_c08_rows_beyond_the_tokenizer_are_never_drawn_nor_counted() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=128,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
        )
    )
    make_constant(model, {125: 50.0})
    for temperature in (0.0, 1.0):
        params = SamplingParams(8, temperature=temperature)
        for completion in engine(model, vocab_size=120).generate([[3]] * 8, params, range(8)):
            assert max(completion.ids) < 120
            assert completion.logprobs == pytest.approx([-math.log(120)] * 8, abs=1e-5)


def test_g01_the_models_generation_config_changes_nothing(llama: torch.nn.Module) -> None:
    params = SamplingParams(10)
    before = engine(llama).generate(PROMPTS, params, SEEDS)
    for name, value in {
        "repetition_penalty": 5.0,
        "top_k": 1,
        "temperature": 0.1,
        "do_sample": True,
        "min_length": 4,
        "suppress_tokens": [3],
        "eos_token_id": list(range(50)),
    }.items():
        setattr(llama.generation_config, name, value)
    assert engine(llama).generate(PROMPTS, params, SEEDS) == before


def test_f07_no_cache_survives_a_change_of_weights(llama: torch.nn.Module) -> None:
    params, veteran = SamplingParams(10), engine(llama)
    before = veteran.generate(PROMPTS, params, SEEDS)
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in llama.parameters():
            weight.add_(torch.randn_like(weight))
    after = veteran.generate(PROMPTS, params, SEEDS)
    assert after != before
    assert after == engine(llama).generate(PROMPTS, params, SEEDS)


@pytest.mark.parametrize("training", [True, False])
def test_dropout_is_off_and_the_model_is_left_as_it_was(training: bool) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCAB, n_embd=16, n_layer=1, n_head=2, n_positions=32,
                   resid_pdrop=0.9, embd_pdrop=0.9, attn_pdrop=0.9, initializer_range=0.3)
    )  # fmt: skip
    model.train(training)
    model.transformer.h[0].eval()
    attention = model.config._attn_implementation
    (done,) = engine(model).generate([[5, 6, 7]], SamplingParams(8), [3])
    assert done.logprobs == pytest.approx(
        rescored(model.eval(), [5, 6, 7], done.ids, 1.0), abs=1e-4
    )
    model.train(training)
    model.transformer.h[0].eval()
    engine(model).generate([[5, 6, 7]], SamplingParams(2), [3])
    assert model.training is training
    assert model.transformer.h[0].training is False
    assert model.config._attn_implementation == attention
    # Parameters must still train after inference mode.
    model(input_ids=torch.tensor([[1, 2]]), labels=torch.tensor([[1, 2]])).loss.backward()


def test_eager_attention_is_respected_and_agrees(llama: torch.nn.Module) -> None:
    params = SamplingParams(10)
    sdpa = engine(llama).generate(PROMPTS, params, SEEDS)
    llama.set_attn_implementation("eager")
    eager = engine(llama).generate(PROMPTS, params, SEEDS)
    assert llama.config._attn_implementation == "eager"
    assert [c.ids for c in eager] == [c.ids for c in sdpa]


def test_an_adapter_takes_part(llama: torch.nn.Module) -> None:
    peft = pytest.importorskip("peft")
    base = engine(llama).generate(PROMPTS, SamplingParams(8), SEEDS)
    model = peft.get_peft_model(llama, peft.LoraConfig(r=4, target_modules="all-linear"))
    untrained = engine(model).generate(PROMPTS, SamplingParams(8), SEEDS)
    assert [c.ids for c in untrained] == [c.ids for c in base]
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight)
    adapted = engine(model).generate(PROMPTS, SamplingParams(8), SEEDS)
    assert [c.ids for c in adapted] != [c.ids for c in base]
    assert adapted[1].logprobs == pytest.approx(
        rescored(model, PROMPTS[1], adapted[1].ids, 1.0), abs=1e-4
    )


def test_the_longest_prompt_that_fits_is_accepted(gpt2: torch.nn.Module) -> None:
    prompt = [3] * 60
    (done,) = engine(gpt2).generate([prompt], SamplingParams(4, temperature=0.0), [0])
    assert done.ids == greedy_without_cache(gpt2, prompt, 4)
