"""Mix the valid samples of all sources into a training and a validation split.

Reads: data/valid/DS.parquet of merge.sources, models/target/config.json (hidden size).
Writes: data/mixture/train.parquet, data/mixture/val.parquet.
Run: python -m eyas.stages.merge. Source: eyas.tokens.mixture.
"""

from pathlib import Path

import hydra
from omegaconf import DictConfig

from eyas.desk.params import Params
from eyas.desk.stage import CONF, Report, run_stage
from eyas.errors import EyasError
from eyas.files import read_json
from eyas.parquet import read_samples, write_samples
from eyas.settings import Merge
from eyas.tokens.mixture import mix, projection


@hydra.main(version_base=None, config_path=CONF, config_name="config")
def main(config: DictConfig) -> None:
    """Merge all sources."""
    run_stage("merge", work, config)


def work(params: Params) -> Report:
    """Mix, split and write."""
    settings = params.section("merge", Merge)
    if strangers := sorted(set(settings.caps) - set(settings.sources)):
        raise EyasError(f"merge.caps: '{strangers[0]}' is not in merge.sources")
    sources = {name: Path(f"data/valid/{name}.parquet") for name in settings.sources}
    hint = "run `dvc repro merge`, which validates every source first"
    mixture = mix({n: read_samples(p, hint=hint) for n, p in sources.items()}, settings)
    if not mixture.train or not mixture.val:
        raise EyasError(
            f"mixture: {len(mixture.train)} training and {len(mixture.val)} validation samples, "
            "expected at least one of each",
            hint="raise budgets, merge.max_tokens or merge.val_permille",
        )
    config = read_json(Path("models/target/config.json"), hint="run `dvc repro target`")
    hidden = int(config.get("text_config", config)["hidden_size"])
    write_samples(Path("data/mixture/train.parquet"), mixture.train)
    write_samples(Path("data/mixture/val.parquet"), mixture.val)
    everything = [*mixture.train, *mixture.val]
    sizes = projection(everything, hidden)
    per_source = {
        f"tokens_{name}": sum(len(s.input_ids) for s in everything if s.dataset == name)
        for name in settings.sources
    }
    return Report(
        summary=f"{len(mixture.train)} training and {len(mixture.val)} validation samples, "
        f"{sizes['tokens']:,} tokens, {sizes['states_bytes'] / 1e6:,.0f} MB of states",
        metrics={
            "rows_in": mixture.rows_in,
            "rows_out": len(everything),
            "train_samples": len(mixture.train),
            "val_samples": len(mixture.val),
            "cut_samples": mixture.cut,
            **sizes,
            **per_source,
            **{f"rejects_{reason}": n for reason, n in sorted(mixture.rejects.items())},
        },
        inputs=tuple(sources.values()),
    )


if __name__ == "__main__":
    main()
