"""Which results compare: a figure goes with what it depends on, and figures whose circumstances
differ are not put in an order."""

from collections.abc import Mapping, Sequence

from ..errors import ConfigError

# of columns of evaluations.csv and held_out.csv: what two figures have to have in common. The data
# by their digest, and by their name where one of two has none
_DRAWN = ("n", "reference_data", "reference", "n_reference", "height", "width", "features")
_DRAWN += ("torch_fidelity", "sampler", "steps", "spacing", "eta", "clip", "guidance")
_HELD_OUT = ("images", "levels", "data")
DEPENDS_ON: dict[str, tuple[str, ...]] = {
    "held_out": _HELD_OUT,
    **dict.fromkeys(("fid", "kid", "isc", "precision", "recall"), _DRAWN),
}
_NAMED_BY = {"reference": "reference_data"}  # what the digest makes superfluous

Record = Mapping[str, object]  # of one figure: by the names above


def differences(records: Mapping[str, Record], across: Sequence[str] = ()) -> list[str]:
    """Why figures with these records, by the names of what has them, do not compare: a sentence for
    each setting that differs, but for those that are meant to (`across`, settings or groups). What
    a record does not say is taken to be the same."""
    found = []
    for key in dict.fromkeys(key for record in records.values() for key in record):
        digest, meant = _NAMED_BY.get(key), {key, key.partition(".")[0]} & set(across)
        if meant or digest and all(record.get(digest) for record in records.values()):
            continue
        said = {name: str(record[key]) for name, record in records.items() if record.get(key, "")}
        first = next(iter(said), None)
        other = next((name for name in said if said[name] != said[first]), None)
        if other is not None:
            found.append(f"{key} is {said[first]} in {first} and {said[other]} in {other}")
    return found


def check_comparable(
    column: str, records: Mapping[str, Record], across: Sequence[str] = ()
) -> None:
    """ConfigError: the figures do not compare, and why."""
    found = differences(records, across)
    if found:
        raise ConfigError(
            f"{column} does not compare: {'; '.join(found)}; evaluate them alike, or say"
            f" across=[{','.join(why.split(' ', 1)[0] for why in found)}] if that is what differs"
        )


def record_of(column: str, row: Mapping[str, object]) -> Record:
    """What the figure of this column in a row of evaluations.csv or held_out.csv depends on."""
    return {key: row[key] for key in DEPENDS_ON.get(column, ()) if row.get(key) not in (None, "")}
