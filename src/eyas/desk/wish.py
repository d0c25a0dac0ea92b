"""What the requests of a data set have in common: the one way from parameters to a Wish."""

from eyas.desk.local_endpoint import target_revision
from eyas.desk.params import Params
from eyas.generation.jobs import Wish
from eyas.settings import DatasetGenerate, Endpoint, PartitionRule, Sampling


def wish_of(params: Params, dataset: str) -> Wish:
    """Read every section that shapes a request.

    Raises: EyasError if the endpoint is local and there is no target.
    """
    endpoint = params.section("endpoint", Endpoint)
    return Wish(
        endpoint=endpoint,
        sampling=params.section("generate", Sampling),
        generate=params.section(f"datasets.{dataset}.generate", DatasetGenerate),
        partition=params.section("partition", dict[str, PartitionRule]),
        target_revision=target_revision() if endpoint.name == "local" else None,
    )
