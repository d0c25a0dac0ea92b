"""Write the drafter as the folder that a server loads: SGLang, vLLM, or speculators' format.

Reads: models/drafter; data/responses, samples, valid and mixture for its lineage.
Writes: models/export (config.json, model.safetensors, README.md).
Run: python -m eyas.stages.export. Source: eyas.drafter.export.
"""

from collections.abc import Sequence
from pathlib import Path

import hydra
from omegaconf import DictConfig

from eyas.desk import lineage
from eyas.desk.params import Params
from eyas.desk.stage import CONF, Report, run_stage
from eyas.drafter.config import DrafterConfig, load_config
from eyas.drafter.export import WEIGHTS, read_tensors, write_export
from eyas.drafter.profiles import profile_named
from eyas.files import read_json
from eyas.records import canonical_json
from eyas.settings import Export

DRAFTER = Path("models/drafter")
OUT = Path("models/export")
CARD = """# EAGLE-3 drafter for {target}

Trained by eyas on replies of the target itself: {documents} documents, {tokens:,} tokens.

| what | value |
|---|---|
| target | {target}, revision `{revision}` |
| data sets | {datasets} |
| aux layers (outputs, the first is 1) | {layers} |
| draft vocabulary | {draft_vocab} of {vocab} ids |
| simulated acceptance length, {split} split, K = {ttt_steps}, with bonus | {tau:.3f} |

{serve}

Embeddings are the target's and are not in this folder. Acceptance length by real draft-verify
decoding on held-out prompts stands in `data/evaluation.json` of the repository that made this:
tokens gained a verification, the bonus token counted, the token of the prefill not. SGLang's
`spec_accept_length` counts that one too, and so is a little higher.
"""


@hydra.main(version_base=None, config_path=CONF, config_name="config")
def main(config: DictConfig) -> None:
    """Export the drafter."""
    run_stage("export", work, config)


def work(params: Params) -> Report:
    """Check, write, read back."""
    config = load_config(DRAFTER / "config.json")
    tensors = read_tensors(DRAFTER / "drafter.safetensors")
    sources = params.section("merge.sources", tuple[str, ...])
    settings = params.section("export", Export)
    found = lineage.collect(sources)
    card = f"{card_of(config, sources, settings.profile)}\n{lineage.card(found)}"
    told = {lineage.KEY: canonical_json(found).decode()}
    form = (settings.profile, settings.verifier)
    write_export(OUT, tensors, config, card, *form, told=told)
    parameters = sum(t.numel() for t in tensors.values() if t.is_floating_point())
    size_bytes = (OUT / WEIGHTS).stat().st_size
    return Report(
        summary=f"{parameters / 1e6:.1f} M parameters, {size_bytes / 1e6:.1f} MB in {OUT} as "
        f"{settings.profile} loads it, read back bit for bit",
        metrics={"parameters": parameters, "size_bytes": size_bytes, "tensors": len(tensors)},
        artifacts=(OUT / "config.json", OUT / "README.md"),
    )


def card_of(config: DrafterConfig, sources: Sequence[str], profile: str) -> str:
    """Return the model card."""
    facts = read_json(DRAFTER / "training.json", hint="run `dvc repro train`")
    length = "simulated_acceptance_length"
    split = "val" if f"val_{length}" in facts else "train"  # a small mixture may have no val
    return CARD.format(
        target=config.target_name,
        revision=config.target_revision,
        datasets=", ".join(sources),
        documents=facts["documents"],
        tokens=facts["tokens"],
        layers=list(config.aux_layers),
        draft_vocab=config.draft_vocab_size,
        vocab=config.vocab_size,
        ttt_steps=facts["ttt_steps"],
        split={"val": "validation", "train": "training"}[split],
        tau=facts[f"{split}_{length}"],
        serve=profile_named(profile).serve,
    )


if __name__ == "__main__":
    main()
