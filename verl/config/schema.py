"""The configuration tree: every setting with its type, range, default and meaning.

Importable without torch. `verl config explain KEY` prints the descriptions written here, so
a description says what the setting does, in which unit, and what the default means.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from verl.config.section import KEY_INDEX, Section

PositiveInt = Annotated[int, Field(gt=0)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]
Dtype = Literal["auto", "float32", "bfloat16"]


def _reward_normalisation(value: Any) -> Any:
    """True and False are the tutorial's spelling of "batch" and "none"."""
    return {True: "batch", False: "none"}[value] if isinstance(value, bool) else value


def _inference_dtype(value: Any) -> Any:
    return {"bf16": "bfloat16", "fp32": "float32"}.get(value, value)


RewardNormalisation = Annotated[
    Literal["none", "batch", "running", "reference"], BeforeValidator(_reward_normalisation)
]
InferenceDtype = Annotated[Dtype, BeforeValidator(_inference_dtype)]


class Lora(Section):
    """Low-rank adapters (Hu et al. 2021) instead of training the full weights."""

    rank: PositiveInt = Field(16, description="Rank of the adapter matrices.")
    alpha: PositiveFloat = Field(
        32.0, description="Scale of the adapter; alpha / rank multiplies it."
    )
    target_modules: list[str] | Literal["all-linear"] = Field(
        "all-linear", description="Names of the linear layers that get an adapter."
    )


class PretrainedModel(Section):
    """What every role needs to know about the weights it starts from."""

    pretrained_path: str | None = Field(
        None, description="Hub id or local folder with safetensors weights (or a GGUF file)."
    )
    gguf_file: str | None = Field(
        None, description="Name of the GGUF file inside pretrained_path; weights are dequantised."
    )
    chat_template: str | None = Field(
        None,
        description="Chat template to use instead of the tokenizer's own: `chatml`, or the path of a "
        "Jinja file. Needed for base models that have none.",
    )
    trust_remote_code: bool = Field(
        False,
        description="Run Python code that ships with this model. Off unless you name it here.",
    )
    allow_pickle_weights: bool = Field(
        False, description="Accept weights in pickle files (.bin). Off: only safetensors or GGUF."
    )


class TrainedModel(PretrainedModel):
    """A role whose weights are trained."""

    dtype: Dtype = Field(
        "auto",
        description="Compute precision. Master weights and Adam states are float32 always; `auto` "
        "measures once whether bfloat16 matrix products are faster on this device.",
    )
    lora: Lora | None = Field(None, description="Train low-rank adapters instead of all weights.")
    train_layers: PositiveInt | None = Field(
        None,
        description="Train only this many transformer blocks, counted from the top, and the final norm "
        "and value head; embeddings and the blocks below stay frozen. Saves time and memory. With "
        "`lora`, only these blocks get adapters.",
    )
    gradient_checkpointing: bool = Field(
        False,
        description="Recompute activations in the backward pass: less memory, about 1/3 more time.",
    )


class ActorModel(TrainedModel):
    """The policy that is trained."""


class CriticModel(TrainedModel):
    """The value network. Without a path it starts from the reward model's weights."""

    value_head_init: Literal["pretrained", "random", "zero"] = Field(
        "pretrained",
        description="Keep the head of the checkpoint (a reward model's score head), draw a new one from "
        "N(0, 1/sqrt(hidden size + 1)), or start from zero, so that the first advantages are the "
        "returns. `zero` suits normalised rewards, whose scale is not that of the raw score.",
    )


class ReferenceModel(PretrainedModel):
    """The frozen policy that KL is measured against. Without a path: the actor's start weights."""

    inference_dtype: InferenceDtype = Field("auto", description="Precision of the frozen copy.")
    offload: bool = Field(
        False,
        description="Keep the weights in host memory and bring them to the device only while they are "
        "used. On a CPU the weights are in host memory anyway.",
    )


class RewardModel(TrainedModel):
    """The learned reward model: trained by `verl rm`, frozen in `verl ppo`."""

    inference_dtype: InferenceDtype = Field("auto", description="Precision when it only scores.")
    score_index: NonNegativeInt | None = Field(
        None,
        description="Which output is the reward, for checkpoints with more than one. Such checkpoints "
        "are refused without it.",
    )
    max_length: PositiveInt | None = Field(
        None,
        description="Longest conversation in tokens; longer ones lose the beginning, never the end of the "
        "response. Default: what the model supports.",
    )


class Models(Section):
    """The four roles."""

    actor: ActorModel = Field(default_factory=ActorModel, description="The policy that is trained.")
    critic: CriticModel = Field(default_factory=CriticModel, description="The value network.")
    ref_policy: ReferenceModel = Field(
        default_factory=ReferenceModel, description="The frozen policy that KL is measured against."
    )
    reward_model: RewardModel = Field(
        default_factory=RewardModel, description="The learned reward model."
    )


class Data(Section):
    """Files, batches and lengths (in tokens)."""

    train: str | None = Field(None, description="Training file (.parquet, .jsonl, .jsonl.gz).")
    eval: str | None = Field(None, description="Held-out file of the same kind.")
    batch_size: PositiveInt = Field(
        32,
        description="Rows per step: prompts for PPO, conversations for SFT, pairs for the reward model.",
    )
    seq_length: PositiveInt = Field(1024, description="Longest prompt + response, in tokens.")
    prompt_length: PositiveInt | None = Field(
        None, description="Longest prompt, in tokens. Default: seq_length - response_length."
    )
    response_length: PositiveInt = Field(256, description="Longest response, in tokens.")
    overlong: Literal["error", "drop", "truncate_left"] = Field(
        "error",
        description="Rows above the limit: stop before the first step naming them, leave them out and say "
        "how many, or cut the beginning of the prompt.",
    )
    shuffle: bool = Field(True, description="New order in each epoch, drawn from train.seed.")
    max_rows: PositiveInt | None = Field(
        None, description="Use only the first rows of the train file."
    )

    @property
    def prompt_limit(self) -> int:
        """Longest prompt in tokens after defaults."""
        return self.prompt_length or self.seq_length - self.response_length


class Optimizer(Section):
    """AdamW and its schedule, shared by all stages."""

    lr_schedule: Literal["linear", "cosine", "constant"] = Field(
        "linear",
        description="Learning rate over the optimiser steps of the run; linear and cosine end at 0.",
    )
    warmup_ratio: Fraction = Field(
        0.0, description="Share of the optimiser steps with a rising rate."
    )
    adam_betas: tuple[Decay, Decay] = Field((0.9, 0.999), description="Decay of Adam's averages.")
    adam_eps: PositiveFloat = Field(1e-8, description="Added to Adam's denominator.")
    weight_decay: NonNegativeFloat = Field(0.0, description="Decoupled weight decay (AdamW).")
    max_grad_norm: PositiveFloat = Field(
        1.0, description="Gradients are scaled down to this global norm."
    )
    max_bad_steps: PositiveInt = Field(
        3,
        description="Stop after this many optimiser steps in a row whose gradient is not finite. Such a "
        "step is never taken.",
    )


Aggregation = Literal[
    "token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"
]


class PPO(Optimizer):
    """Proximal policy optimisation (Schulman et al. 2017) with a learned reward model."""

    adam_eps: PositiveFloat = Field(
        1e-5, description="Added to Adam's denominator (PPO uses 1e-5)."
    )
    actor_lr: PositiveFloat = Field(1e-6, description="Peak learning rate of the actor.")
    critic_lr: PositiveFloat | None = Field(
        None, description="Peak learning rate of the critic. Default: 10 x actor_lr."
    )
    epochs: PositiveInt = Field(4, description="Passes over each rollout batch.")
    minibatch_size: PositiveInt | None = Field(
        None, description="Samples per optimiser step. Default: the whole batch."
    )
    clip_epsilon: Annotated[float, Field(gt=0, lt=1)] = Field(
        0.2, description="The ratio is clipped below 1 - clip_epsilon."
    )
    clip_epsilon_high: PositiveFloat | None = Field(
        None, description="The ratio is clipped above 1 + this. Default: clip_epsilon."
    )
    dual_clip: Annotated[float, Field(gt=1)] | None = Field(
        None, description="Bound of the loss for negative advantages (Ye et al. 2020); 3 is usual."
    )
    value_clip: PositiveFloat | None = Field(
        0.2, description="Range in which a new value may leave the old one; null turns it off."
    )
    kl_coef: NonNegativeFloat = Field(
        0.05, description="Weight of the per-token KL penalty in the reward."
    )
    kl_estimator: Literal["k1", "k2", "k3", "abs"] = Field(
        "k1", description="Estimator of the KL penalty in the reward (Schulman 2020)."
    )
    kl_controller: Literal["fixed", "adaptive"] = Field(
        "fixed", description="Keep kl_coef, or steer it towards kl_target (Ziegler et al. 2019)."
    )
    kl_target: PositiveFloat = Field(
        6.0, description="Sequence KL in nats that the adaptive controller aims at."
    )
    kl_horizon: PositiveInt = Field(
        10000, description="Samples over which the adaptive controller acts."
    )
    kl_loss_coef: NonNegativeFloat = Field(
        0.0, description="Weight of a KL term in the policy loss."
    )
    kl_loss_estimator: Literal["k1", "k2", "k3", "abs"] = Field(
        "k3", description="Estimator of the KL term in the policy loss."
    )
    gamma: Fraction = Field(1.0, description="Discount per token.")
    lam: Fraction = Field(0.95, description="GAE lambda (Schulman et al. 2016).")
    bootstrap_truncated: bool = Field(
        False,
        description="Responses cut at the length limit continue with the critic's value instead of 0.",
    )
    whiten_advantage: bool = Field(
        True, description="Shift and scale advantages to mean 0, variance 1."
    )
    normalize_reward: RewardNormalisation = Field(
        "none",
        description="Scores as they are, standardised within the batch (true is a synonym), over the whole "
        "run, or by the mean and deviation measured on the reward model's held-out set.",
    )
    reward_clip: PositiveFloat | None = Field(
        None, description="Scores are clipped to +- this after normalisation, before KL."
    )
    missing_eos_penalty: NonNegativeFloat = Field(
        0.0, description="Taken from the score of a response that was cut at the length limit."
    )
    missing_eos_mode: Literal["subtract", "replace"] = Field(
        "subtract",
        description="Subtract the penalty from the score, or put minus the penalty in its place.",
    )
    overlong_buffer: NonNegativeInt = Field(
        0,
        description="Length of the zone before response_length in which the overlong penalty grows.",
    )
    overlong_penalty: NonNegativeFloat = Field(
        0.0, description="Penalty of a response at the very limit (Yu et al. 2025, eq. 13)."
    )
    entropy_coef: NonNegativeFloat = Field(0.0, description="Weight of the entropy bonus.")
    critic_warmup_steps: NonNegativeInt = Field(
        0, description="First steps in which only the critic is trained."
    )
    aggregation: Aggregation = Field(
        "token-mean", description="How token losses become one number; counts are global."
    )

    @property
    def critic_rate(self) -> float:
        """Critic learning rate after defaults."""
        return self.critic_lr if self.critic_lr is not None else 10 * self.actor_lr

    @property
    def needs_reference(self) -> bool:
        """Whether any term uses the reference policy."""
        return self.kl_coef > 0 or self.kl_loss_coef > 0


class SFT(Optimizer):
    """Supervised fine-tuning on the chosen answers."""

    lr: PositiveFloat = Field(2e-5, description="Peak learning rate.")
    train_on: Literal["assistant", "last"] = Field(
        "assistant",
        description="Which tokens carry loss: every assistant turn, or only the last one.",
    )


class RewardModelTraining(Optimizer):
    """Bradley-Terry reward modelling on chosen/rejected pairs."""

    lr: PositiveFloat = Field(1e-5, description="Peak learning rate.")
    use_margin: bool = Field(True, description="Use the `margin` column where the data has one.")
    centering_coef: NonNegativeFloat = Field(
        0.0,
        description="Weight of (chosen + rejected)^2, which pulls scores towards mean 0 "
        "(Eisenstein et al. 2023); 0.01 is usual.",
    )


class Train(Section):
    """How long, in what order, and the settings of each stage."""

    seed: NonNegativeInt = Field(0, description="The root of every random draw of the run.")
    num_epochs: PositiveInt = Field(1, description="Passes over the training file.")
    total_steps: PositiveInt | None = Field(
        None, description="Stop after this many steps, even inside an epoch."
    )
    tokens_per_microbatch: PositiveInt | None = Field(
        None,
        description="Tokens that go through a model at once. Changes memory and speed, never the "
        "result. Default: 512 on a CPU, 8192 on a GPU.",
    )
    deterministic: bool = Field(
        False,
        description="Ask torch for deterministic kernels on GPUs (slower); CPUs need nothing.",
    )
    ppo: PPO = Field(default_factory=PPO, description="PPO.")
    sft: SFT = Field(default_factory=SFT, description="Supervised fine-tuning.")
    reward_model: RewardModelTraining = Field(
        default_factory=RewardModelTraining, description="Reward-model training."
    )


class Rollout(Section):
    """How responses are sampled. Nothing is taken from a model folder's generation_config."""

    engine: Literal["native"] = Field(
        "native", description="`native` samples with the actor's own weights in this process."
    )
    temperature: NonNegativeFloat = Field(
        1.0, description="Logits are divided by this, in sampling and in every policy log-prob."
    )
    top_p: Annotated[float, Field(gt=0, le=1)] = Field(1.0, description="Nucleus sampling.")
    top_k: NonNegativeInt = Field(0, description="Sample among the k most likely tokens; 0 is off.")
    min_tokens: NonNegativeInt = Field(
        0, description="A response does not end before this many tokens."
    )
    stop_token_ids: list[NonNegativeInt] = Field(
        default_factory=list,
        description="Ids that end a response besides the tokenizer's end-of-sequence and end-of-turn ids.",
    )
    ignore_eos: bool = Field(
        False, description="Never stop before response_length (for benchmarks)."
    )
    max_rows: PositiveInt = Field(64, description="Responses generated at the same time.")
    trust_logprobs: bool = Field(
        False,
        description="Take the sampler's log-probs as the old ones instead of computing them again. "
        "Exact to rounding where it has the trainer's weights and precision; "
        "policy/first_ratio_deviation shows the difference.",
    )


Placement = dict[str, Any]


class Resource(Section):
    """Devices of each role: {"gpu": [0]}, {"gpu": 1} or {"cpu": 1}. Default: one GPU, else the CPU."""

    actor: Placement | None = Field(None, description="Devices of the actor.")
    critic: Placement | None = Field(None, description="Devices of the critic.")
    ref_policy: Placement | None = Field(None, description="Devices of the reference policy.")
    reward_model: Placement | None = Field(None, description="Devices of the reward model.")


class Checkpoint(Section):
    """What is kept of a run, and how often."""

    every: PositiveInt = Field(
        50, description="Steps between checkpoints; the last step is saved always."
    )
    keep: PositiveInt = Field(2, description="Newest checkpoints kept, besides the best one.")


class Eval(Section):
    """Held-out evaluation at both ends of the run and in between."""

    every: NonNegativeInt = Field(
        20, description="Steps between evaluations; 0: only at both ends."
    )
    at_start: bool = Field(
        True,
        description="Evaluate before the first step too. PPO always does: those answers are what "
        "it compares with.",
    )
    num_prompts: PositiveInt = Field(64, description="Held-out prompts (or rows) used.")
    temperature: PositiveFloat = Field(1.0, description="Temperature of the sampled answers.")


class Alert(Section):
    """A limit on a metric and what happens when it is passed."""

    limit: float = Field(description="The alert fires when the metric is above this.")
    action: Literal["warn", "stop"] = Field(
        "warn", description="Print a warning, or stop with exit code 4."
    )


class Alerts(Section):
    """Limits that are watched while PPO trains."""

    sequence_kl: Alert = Field(
        default_factory=lambda: Alert(limit=30.0), description="Mean KL per response, in nats."
    )
    first_ratio: Alert = Field(
        default_factory=lambda: Alert(limit=1e-2),
        description="Largest |ratio - 1| before the first update of a step; it should be rounding only.",
    )


class Monitor(Section):
    """Where metrics go. metrics.jsonl in the run directory is written always."""

    trackers: list[Literal["tensorboard"]] | None = Field(
        None, description="Extra trackers. Default: TensorBoard when it is installed."
    )
    alerts: Alerts = Field(default_factory=Alerts, description="Limits that are watched.")


class Config(Section):
    """The whole tree."""

    run_dir: str = Field(
        "runs/default", description="Directory of this run: config, metrics, checkpoints."
    )
    model: Models = Field(default_factory=Models, description="The four roles.")
    data: Data = Field(default_factory=Data, description="Files, batches and lengths.")
    train: Train = Field(default_factory=Train, description="Training.")
    rollout: Rollout = Field(default_factory=Rollout, description="Sampling.")
    resource: Resource = Field(default_factory=Resource, description="Devices.")
    checkpoint: Checkpoint = Field(default_factory=Checkpoint, description="Checkpoints.")
    eval: Eval = Field(default_factory=Eval, description="Evaluation.")
    monitor: Monitor = Field(default_factory=Monitor, description="Metrics and alerts.")

    @model_validator(mode="after")
    def _link_sections(self) -> Config:
        self.link()
        return self


def _index(section: type[Section], prefix: str = "") -> None:
    from verl.config.section import section_class

    for name, field in section.model_fields.items():
        path = f"{prefix}.{name}" if prefix else name
        KEY_INDEX.setdefault(name, []).append(path)
        inner = section_class(field.annotation)
        if inner is not None:
            _index(inner, path)


_index(Config)


def get_default_config() -> Config:
    """Return a fresh tree with every default; edit it by attribute or load a file over it."""
    return Config()
