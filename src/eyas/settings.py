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
    seed: int | None = None  # train_tiny


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The model that answers and that the drafter learns to foresee."""

    name: str
    codec: str  # tokens/codecs: how prompts are rendered and replies become ids
    dtype: str  # of the saved weights: bfloat16 | float32
    source: TargetSource


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """What the local endpoint charges, so that money is real in the default run too."""

    prompt_usd_per_mtok: float
    completion_usd_per_mtok: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Who answers; how it is reached stands under runtime.connection."""

    name: str  # local | openrouter
    model: str
    provider: dict[str, Any]  # OpenRouter's provider object, sent as it is
    prices: Prices | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where a data set's upstream rows come from."""

    kind: str  # file | wheel | hub
    path: str | None = None  # file: a path; wheel: one inside the package; hub: a pattern of files
    package: str | None = None  # wheel
    repo: str | None = None  # hub
    revision: str | None = None  # hub: full commit hash
    split: str | None = None  # hub: streamed where no path is given
    subset: str | None = None  # hub: of the split, where the data set has several
    functions: str | None = None  # file, wheel: BFCL's function documents, for multi-turn rows


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationSet:
    """Prompts that something is measured on, so that none of them is trained on."""

    schema: str
    source: Source


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """A prompt is dropped if its users say so many words in a row that evaluation prompts say."""

    num_words: int
    heldout: bool  # compare with this data set's own held-out rows too
    against: tuple[EvaluationSet, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetPrepare:
    """How many upstream rows become prompts; the seed shuffles before the cut."""

    schema: str  # prompts/schemas: messages | bfcl | humaneval | ...
    max_rows: int | None
    partition: str | None  # null: by prompt length
    seed: int
    max_upstream_rows: int | None = None  # read no further; null: all of them
    near_duplicate_jaccard: float | None = None  # 0..1, share of common word runs; null: keep all
    overlap: Overlap | None = None  # null: nothing is compared


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetGenerate:
    """What may be spent on one data set."""

    budget_tokens: int | None  # null: all prompts
    samples_per_prompt: int
    max_tokens: int | None  # null: the partition's
    budget_counts: str = "total"  # total: prompt + completion tokens | completion
    budget_usd: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """One data set: the target answers `prompts`; it has already written `trajectories`."""

    kind: str
    licence: str
    source: Source
    prepare: DatasetPrepare
    generate: DatasetGenerate


@dataclass(frozen=True, slots=True, kw_only=True)
class Heldout:
    """The evaluation split: rows whose id hashes below `permille`, never sent, never trained on."""

    permille: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionRule:
    """Short or long, and how many tokens an answer may have."""

    max_prompt_tokens: int | None  # null: no limit
    max_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Sent with every request and part of its fingerprint."""

    temperature: float
    top_p: float
    seed: int
    reasoning: dict[str, Any] | None = None  # {enabled | effort | max_tokens}; null: not sent


@dataclass(frozen=True, slots=True, kw_only=True)
class Validate:
    """Gates: which rows are dropped, and when the stage fails."""

    max_count_delta: int  # tokens between rebuilt ids and billing that still count as near
    keep_near: bool
    min_accepted_share: float  # 0..1; below it the stage fails with the table of reasons
    repeat_ngram: int  # a reply is a loop if its last `repeat_ngram * repeat_times` tokens have a
    repeat_times: int  # period of at most `repeat_ngram`
    drop_loops: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Merge:
    """The training mixture."""

    sources: tuple[str, ...]
    caps: dict[str, int]  # data set -> at most so many samples
    token_caps: dict[str, int]  # data set -> at most so many tokens
    weights: dict[str, float]  # data set -> share of its rows, 0..1
    drop: tuple[str, ...]  # data sets that stay out of the mixture
    extract_tokens_per_s: float | None  # for the projection; null: the last extraction's
    max_tokens: int  # longer samples are cut at a reply's start, never inside a reply
    val_permille: int
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Extract:
    """Which hidden states are kept, and how."""

    backend: str  # transformers | sglang
    layers: tuple[int, ...] | None  # outputs of these layers; null: [1, N/2-1, N-4]
    codec: str  # of the layers' states: fp32 | bf16 | fp8 | int4
    shard_tokens: int
    batch_tokens: int  # real tokens a forward pass, rows of like length
    final_codec: str = "bf16"  # of the final state: fp32 | bf16 | fp8
    final_rows: str = "all"  # which rows keep it: all | supervised (those that the loss reads)
    compute_dtype: str | None = None  # null: float32; sglang: the target's own


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafter:
    """The shape of the drafter; null takes the target's."""

    family: str  # eagle3
    draft_vocab_size: int
    num_attention_heads: int | None
    num_key_value_heads: int | None
    intermediate_size: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Train:
    """The training run. Rates and sizes are per optimiser step."""

    start: str  # ridge | random
    ridge_strength: float
    norm_scale: float  # final norm weight at the start: softer logits, same argmax
    lr: float
    tokens_per_step: int
    epochs: int
    ttt_steps: int
    ttt_decay: float
    warmup_ratio: float
    clip_norm: float
    weight_decay: float
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluate:
    """Draft-verify decoding on the held-out prompts."""

    max_prompts_per_set: int
    max_new_tokens: int
    draft_steps: tuple[int, ...]  # the K of each run; the table is at `headline_steps`
    headline_steps: int
    lookup_ngram: int  # prompt lookup tries this n-gram, then shorter ones


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

    checkpoint_every_s: float
    log_every_steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtractRuntime:
    """Who makes the shards of the hidden-state store."""

    workers: int  # processes that make shards at the same time; sglang: for each server
    servers: tuple[str, ...]  # sglang: addresses
    patience_s: float  # sglang: how long a server that is gone is waited for


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime:
    """This machine, this moment: changes no output and is in no `params:` list."""

    tracking: str  # mlflow | off
    threads: int | None  # torch threads; null: all cores
    store: str  # folder of the hidden-state shards
    concurrency: dict[str, int]  # partition -> requests in flight at most
    connection: Connection
    train: TrainRuntime
    extract: ExtractRuntime
