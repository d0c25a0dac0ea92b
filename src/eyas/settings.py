"""Every option there is: a frozen dataclass for each section of conf/, strictly filled.

A field without a default must stand in conf/. Units are in the names.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetSource:
    """Where the target's weights and tokenizer come from."""

    kind: str  # wheel_gguf | hub | folder | train_tiny
    package: str | None = None  # wheel_gguf: installed package that holds the file
    file: str | None = None  # wheel_gguf: file name inside the package
    sha256: str | None = None  # wheel_gguf: of that file
    repo: str | None = None  # hub: owner/name
    revision: str | None = None  # hub: full commit hash
    path: str | None = None  # folder: a Hugging Face folder
    weights: str = "all"  # hub, folder: all | head (embedding, final norm and lm_head alone)
    steps: int | None = None  # train_tiny: optimiser steps
    seed: int | None = None  # train_tiny: of weights and batches


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The model that answers and that the drafter learns to foresee."""

    name: str  # as reports and exports call it
    codec: str  # tokens/codecs: how prompts are rendered and replies become ids
    dtype: str  # of the saved weights: bfloat16 | float32
    source: TargetSource  # where it comes from


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """What the local endpoint charges, so that money is real in the default run too."""

    prompt_usd_per_mtok: float  # dollars a million tokens of prompts
    completion_usd_per_mtok: float  # dollars a million tokens of replies


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Who answers; how it is reached stands under runtime.connection."""

    name: str  # local | openrouter
    model: str  # as the endpoint calls it
    provider: dict[str, Any]  # OpenRouter's provider object, sent as it is
    prices: Prices | None  # null: the market's, in real money
    logprobs: bool = False  # ask for each token's text too: exact ids where text has two spellings


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where a data set's upstream rows come from."""

    kind: str  # file | wheel | hub
    path: str | None = None  # file: a path; wheel: one inside the package; hub: a pattern of files
    package: str | None = None  # wheel: installed package that holds the file
    repo: str | None = None  # hub: owner/name
    revision: str | None = None  # hub: full commit hash
    split: str | None = None  # hub: streamed where no path is given
    subset: str | None = None  # hub: of the split, where the data set has several
    functions: str | None = None  # file, wheel: BFCL's function documents, for multi-turn rows


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationSet:
    """Prompts that something is measured on, so that none of them is trained on."""

    schema: str  # as of a data set's rows
    source: Source  # as of a data set


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """A prompt is dropped if its users say so many words in a row that evaluation prompts say."""

    num_words: int  # in a row
    heldout: bool  # compare with this data set's own held-out rows too
    against: tuple[EvaluationSet, ...]  # other evaluation prompts


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetPrepare:
    """How many upstream rows become prompts; the seed shuffles before the cut."""

    schema: str  # prompts/schemas: messages | bfcl | humaneval | ...
    max_rows: int | None  # prompts at most; held-out rows come on top; null: all
    partition: str | None  # short | long; null: by prompt length
    seed: int  # of the shuffle
    max_upstream_rows: int | None = None  # read no further; null: all of them
    near_duplicate_jaccard: float | None = None  # 0..1, share of common word runs; null: keep all
    overlap: Overlap | None = None  # null: nothing is compared


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetGenerate:
    """What may be spent on one data set."""

    budget_tokens: int | None  # null: all prompts
    samples_per_prompt: int  # answers wanted for each prompt
    max_tokens: int | None  # null: the partition's
    budget_counts: str = "total"  # total: prompt + completion tokens | completion
    budget_usd: float | None = None  # null: no limit in dollars


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """One data set: the target answers `prompts`; it has already written `trajectories`."""

    kind: str  # prompts | trajectories
    licence: str  # of the rows; goes with every prompt
    source: Source  # where the rows come from
    prepare: DatasetPrepare  # how rows become prompts
    generate: DatasetGenerate  # what may be spent


@dataclass(frozen=True, slots=True, kw_only=True)
class Heldout:
    """The evaluation split: rows whose id hashes below `permille`, never sent, never trained on."""

    permille: int  # of the rows, 0 to 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionRule:
    """Short or long, and how many tokens an answer may have."""

    max_prompt_tokens: int | None  # null: no limit
    max_tokens: int  # of an answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Sent with every request and part of its fingerprint."""

    temperature: float  # as the endpoint takes it
    top_p: float  # as the endpoint takes it
    seed: int  # of each request's own seed, and of the order in which prompts are asked
    reasoning: dict[str, Any] | None = None  # {enabled | effort | max_tokens}; null: not sent


@dataclass(frozen=True, slots=True, kw_only=True)
class Validate:
    """Gates: which rows are dropped, and when the stage fails."""

    max_count_delta: int  # tokens between rebuilt ids and billing that still count as near
    keep_near: bool  # keep rows whose count is near but not exact
    min_accepted_share: float  # 0..1; below it the stage fails with the table of reasons
    repeat_ngram: int  # longest period, in tokens, of what counts as a loop
    repeat_times: int  # a loop: the last `repeat_ngram * repeat_times` tokens have such a period
    drop_loops: bool  # reject replies that end in a loop; else flag them


@dataclass(frozen=True, slots=True, kw_only=True)
class Merge:
    """The training mixture."""

    sources: tuple[str, ...]  # data sets of the mixture, in order
    caps: dict[str, int]  # data set -> at most so many samples
    token_caps: dict[str, int]  # data set -> at most so many tokens
    weights: dict[str, float]  # data set -> share of its rows, 0..1
    drop: tuple[str, ...]  # data sets that stay out of the mixture
    extract_tokens_per_s: float | None  # for the projection; null: the last extraction's
    max_tokens: int  # longer samples are cut at a reply's start, never inside a reply
    val_permille: int  # of the conversations, for the validation split
    seed: int  # of the shuffle and of the split


@dataclass(frozen=True, slots=True, kw_only=True)
class Extract:
    """Which hidden states are kept, and how."""

    backend: str  # who runs the target: transformers | sglang
    layers: tuple[int, ...] | None  # outputs of these layers; null: [1, N/2-1, N-4]
    codec: str  # of the layers' states: fp32 | bf16 | fp8 | int4
    shard_tokens: int  # at most, of one file; a longer sample is alone in its own
    batch_tokens: int  # real tokens a forward pass, rows of like length
    final_codec: str = "bf16"  # of the final state: fp32 | bf16 | fp8
    final_rows: str = "all"  # which rows keep it: all | supervised (those that the loss reads)
    teacher_k: int | None = None  # log-probabilities kept of each supervised row; null: none
    final_every: int = 1  # with teacher_k: of these rows, each n-th keeps its final state too
    compute_dtype: str | None = None  # null: float32; sglang: the target's own
    window_gb: float | None = None  # of shards at a time; null: all are kept


@dataclass(frozen=True, slots=True, kw_only=True)
class Mla:
    """Latent attention, for `drafter.family: eagle3_mla`; null takes the target's."""

    q_lora_rank: int | None = None  # a target without one: a plain q_proj, which SGLang refuses
    kv_lora_rank: int | None = None  # of keys and values together: what a server caches
    qk_nope_head_dim: int | None = None  # of a query or key, without position
    qk_rope_head_dim: int | None = None  # of a query or key, rotated; one key for all heads
    v_head_dim: int | None = None  # of a value


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafter:
    """The shape of the drafter; null takes the target's."""

    family: str  # eagle3 | eagle3_mla: the layer is Llama's, or has DeepSeek's latent attention
    draft_vocab_size: int  # at most so many target tokens; a smaller target's whole vocabulary
    num_attention_heads: int | None  # null: the target's
    num_key_value_heads: int | None  # null: the target's
    intermediate_size: int | None  # null: the target's
    fc_norm: bool = False  # EAGLE-3.1's RMS norm of each aux state before fc
    mla: Mla = Mla()  # eagle3_mla: its sizes


@dataclass(frozen=True, slots=True, kw_only=True)
class Train:
    """The training run. Rates and sizes are per optimiser step."""

    start: str  # ridge | random
    ridge_strength: float  # of the regression that makes the start
    norm_scale: float  # final norm weight at the start: softer logits, same argmax
    lr: float  # of AdamW, at its highest
    tokens_per_step: int  # of whole samples packed into one step
    epochs: int  # over the training split, of each run of a soup
    ttt_steps: int  # guesses in a row that are trained
    ttt_decay: float  # weight of each guess against the one before
    warmup_ratio: float  # share of the steps in which lr rises
    clip_norm: float  # of the gradient
    weight_decay: float  # of AdamW
    dtype: str  # of the products, sums are float32: auto (bfloat16 where fast) | float32 | bfloat16
    micro_tokens: int | None  # tokens of a forward and backward; null: all of a step at once
    recompute: bool  # make a step's activations again in the backward: less memory, same bits
    seed: int  # of the start, where random, and of the order
    feedback_rounds: int = 0  # ridge: how often the MLP is solved on the drafter's own states
    feedback_strength: float = 0.1  # of these regressions
    induction: bool = False  # ridge: heads that look for the last token's earlier occurrences
    soup: int = 1  # runs from the same start, in other orders, whose weights are averaged
    patience: int | None = None  # epochs without gain on the validation split that end the run
    loss: str = "kl"  # kl | tv | nla | lk: what a prediction is trained on (docs/training_step.md)


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """The form of the exported folder."""

    profile: str  # sglang | vllm | speculators
    verifier: str | None = None  # speculators: the target's name or path where it is served


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluate:
    """Draft-verify decoding on the held-out prompts."""

    max_prompts_per_set: int  # held-out prompts decoded of each data set
    max_new_tokens: int  # of each prompt
    draft_steps: tuple[int, ...]  # the K of each run; the table is at `headline_steps`
    headline_steps: int  # the K of the table, decoded for real too
    lookup_ngram: int  # prompt lookup tries this n-gram, then shorter ones
    backend: str = "transformers"  # transformers | sglang


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """How the endpoint is reached."""

    url: str | None  # null: start the local server on a free port
    api_key_env: str | None  # name of the environment variable; the key itself is never written
    timeout_s: float  # wall deadline of one request
    attempts: int  # at most, per row
    slots: int  # local: rows decoded together
    confirm_above_usd: float | None = None  # above: waits for `eyas plan --yes`; null: never
    cache_ttl_s: int | None = None  # OpenRouter keeps answers so long; null: not at all


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainRuntime:
    """How training is watched and saved."""

    checkpoint_every_s: float  # what a kill costs at most
    log_every_steps: int  # a line, and a point of the curves in MLflow
    shard: bool = False  # of several ranks each keeps a part of weights and moments


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepRuntime:
    """What a job of a sweep may do."""

    budget_tokens: int | None = None  # for each data set that it asks anew; null: it may ask none


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtractRuntime:
    """Who makes the shards of the hidden-state store."""

    workers: int = 1  # processes that make shards at the same time; sglang: for each server
    servers: tuple[str, ...] = ()  # sglang: addresses
    patience_s: float = 600.0  # sglang: how long a server that is gone is waited for
    keep_windows: bool = False  # with extract.window_gb: delete no shard
    ray: str | None = None  # workers on a Ray cluster: local | auto | an address; null: processes


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime:
    """This machine, this moment: changes no output and is in no `params:` list."""

    tracking: str  # mlflow | off
    threads: int | None  # torch threads; null: all cores
    store: str  # folder of the hidden-state shards
    concurrency: dict[str, int]  # partition -> requests in flight at most
    connection: Connection  # how the endpoint is reached
    train: TrainRuntime  # how training is watched
    sweep: SweepRuntime = SweepRuntime()  # what a sweep's jobs may buy
    sglang_url: str | None = None  # of the server that evaluate.backend=sglang asks
    extract: ExtractRuntime = ExtractRuntime()  # who makes the shards
