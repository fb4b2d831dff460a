"""Reads and verifies the newest committed step: written from docs/formats.md, without jaxres."""

import hashlib
import json

import numpy as np
import tensorstore
import xxhash


def json_text(value):
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def array_digest(path, array):
    shape, lengths, size = array.shape, [max(n, 1) for n in array.shape], array.nbytes
    while size > max(16384, array.nbytes // 4096) and not all(n % 2 for n in lengths):
        dim = min((shape[d] // n, d) for d, n in enumerate(lengths) if n % 2 == 0)[1]
        lengths[dim], size = lengths[dim] // 2, size // 2
    text, counts = json_text([path, array.dtype.name, list(shape)]), np.maximum(shape, 1) // lengths
    for position in np.ndindex(*counts):
        block = tuple(slice(p * n, (p + 1) * n) for p, n in zip(position, lengths, strict=True))
        text += xxhash.xxh3_128_digest(array[block].astype(array.dtype.newbyteorder("<")).tobytes())
    return xxhash.xxh3_128_hexdigest(text)


def committed_steps(log):
    newest, commits = 0, {}
    for path in sorted(log.iterdir()):
        record = json.loads(path.read_text())
        assert record.pop("digest") == xxhash.xxh3_128_hexdigest(json_text(record)), path
        newest, step = max(newest, record.get("attempt", 0)), record.get("step")
        kind = record["kind"] if record.get("attempt") == newest else "ignored"
        if kind == "commit":
            commits[step] = record
        elif kind in ("prune", "rollback", "quarantine"):
            last, gone = record.get("target", np.inf), {*record.get("steps", [record.get("path")])}
            commits = {n: c for n, c in commits.items() if n <= last and not {n, c["path"]} & gone}
    return commits


def checked_digest(root):
    commit = max(committed_steps(root / "log").items())[1]
    step_dir, rows = root / commit["path"], []
    text = (step_dir / "MANIFEST.json").read_bytes()
    assert commit["manifest"] == "sha256:" + hashlib.sha256(text).hexdigest()
    manifest = json.loads(text)
    for name, info in manifest["files"].items():
        data = (step_dir / name).read_bytes()
        assert info == {"size": len(data), "xxh3_128": xxhash.xxh3_128_hexdigest(data)}, name
    for path, info in sorted(manifest["arrays"].items()):
        folder = "frozen" if path in manifest.get("frozen", ()) else "state"
        url = f"file://{step_dir}/{folder}/|ocdbt:{path.replace('/', '.')}/|zarr3:"
        array = tensorstore.open(url).result().read().result()
        rows.append([path, array.dtype.name, list(array.shape), array_digest(path, array)])
        assert rows[-1][1:] == [info["dtype"], info["shape"], info["digest"]], path
    facts = json.loads((step_dir / "progress.json").read_text()) | {"arrays": rows}
    text = json_text({key: facts[key] for key in ("arrays", "step", "cursor", "epoch", "tokens")})
    assert manifest["digest"] == "sha256:" + hashlib.sha256(text).hexdigest()
    return manifest["digest"]
