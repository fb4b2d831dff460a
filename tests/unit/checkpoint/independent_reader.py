"""Independent reader of the format, written from docs/formats.md without jaxres."""

import hashlib
import json
import math

import numpy as np
import tensorstore
import xxhash


def json_text(value):
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def array_digest(path, array):
    shape, size = array.shape, math.prod(array.shape) * array.dtype.itemsize
    counts = [1 for _ in shape]
    while size // math.prod(counts) > max(16384, size // 4096):
        candidates = [(counts[d], d) for d in range(len(shape)) if (shape[d] / counts[d]) % 2 == 0]
        if not candidates:
            break
        counts[min(candidates)[1]] *= 2
    little = array.astype(array.dtype.newbyteorder("<"))
    text = json_text([path, array.dtype.name, list(shape)])
    for position in np.ndindex(*counts):
        where = []
        for index, length, count in zip(position, shape, counts, strict=True):
            where.append(slice(index * length // count, (index + 1) * length // count))
        text += xxhash.xxh3_128_digest(little[tuple(where)].tobytes())
    return xxhash.xxh3_128_hexdigest(text)


def committed_steps(log):
    """Returns step -> commit record of the steps that are in force."""
    newest, commits = 0, {}
    for path in sorted(log.iterdir()):
        record = json.loads(path.read_text())
        assert record.pop("digest") == xxhash.xxh3_128_hexdigest(json_text(record)), path
        if record["attempt"] < newest:
            continue
        newest, kind, step = record["attempt"], record["kind"], record.get("step")
        if kind == "commit":
            commits[step] = record
        elif kind in ("prune", "rollback"):
            last, gone = record.get("target", math.inf), record.get("steps", ())
            commits = {n: kept for n, kept in commits.items() if n <= last and n not in gone}
        elif kind == "quarantine" and commits.get(step, record)["path"] == record["path"]:
            commits.pop(step, None)
    return commits


def checked_digest(root):
    """Returns the content digest of the newest committed step; fails if anything is damaged."""
    _, commit = max(committed_steps(root / "log").items())
    text = (root / commit["path"] / "MANIFEST.json").read_bytes()
    assert commit["manifest"] == "sha256:" + hashlib.sha256(text).hexdigest()
    manifest, rows = json.loads(text), []
    for name, info in manifest["files"].items():
        data = (root / commit["path"] / name).read_bytes()
        assert info == {"size": len(data), "xxh3_128": xxhash.xxh3_128_hexdigest(data)}, name
    for path, info in sorted(manifest["arrays"].items()):
        folder = "frozen" if path in manifest.get("frozen", ()) else "state"
        base = {"driver": "file", "path": f"{root / commit['path']}/{folder}/"}
        store = {"driver": "ocdbt", "base": base, "path": path.replace("/", ".") + "/"}
        array = tensorstore.open({"driver": "zarr3", "kvstore": store}).result().read().result()
        rows.append([path, array.dtype.name, list(array.shape), array_digest(path, array)])
        assert rows[-1][1:] == [info["dtype"], info["shape"], info["digest"]], path
    facts = json.loads((root / commit["path"] / "progress.json").read_text())
    digested = {name: facts[name] for name in ("step", "cursor", "epoch", "tokens")}
    digest = "sha256:" + hashlib.sha256(json_text(digested | {"arrays": rows})).hexdigest()
    assert digest == manifest["digest"]
    return digest
