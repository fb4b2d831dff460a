"""Hugging Face's config.json and the `model` section: decoders of six families, both ways.

A family has a fixed style (norms, biases, activation, positions) and sizes of its own; names and
defaults are those of the family's class in transformers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from jaxres.config import huggingface_keys
from jaxres.config.errors import Problem
from jaxres.config.schema.data import TextualSource, kinds_of
from jaxres.config.schema.model import GptModel, LinearScaling, Llama3Scaling
from jaxres.config.yaml import Node, plain
from jaxres.faults import ConfigError
from jaxres.storage import files, foreign_json
from jaxres.storage.path import RunPath, normalized, parse_path

GEMMA = {"norm": "rms_plus_1", "activation": "gelu_tanh", "scale_embeddings": True}
STYLES: Mapping[str, Mapping[str, Any]] = {
    "llama": {},
    "mistral": {},
    "qwen2": {"bias": "qkv"},
    "qwen3": {"qk_norm": True},
    "gemma": GEMMA,
    "gemma3_text": {**GEMMA, "post_norms": True, "qk_norm": True},
    "gpt2": {
        "norm": "layer",
        "bias": "all",
        "activation": "gelu_tanh",
        "gated": False,
        "positions": "learned",
    },
}
"""model_type of config.json -> keys of the model section that differ from Llama's."""
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}
GELUS = ("gelu", "gelu_pytorch_tanh", "gelu_new")
"""Values of hidden_act of a Gemma, all of which mean the same there."""
FULL, SLIDING = "full_attention", "sliding_attention"
LAYER_KINDS = {FULL, SLIDING}
WINDOWS = {"mistral": 4096, "qwen2": 4096, "qwen3": 4096, "gemma3_text": 4096}
"""Default of sliding_window; of the others there is none."""
FULL_BEFORE = 28
"""Default of max_window_layers, the number of first layers with full attention."""
KV_HEADS = {"mistral": 8, "qwen2": 32, "qwen3": 32, "gemma": 16, "gemma3_text": 4}
"""Default of num_key_value_heads; of the others, and if it is null, num_attention_heads."""
SCORE_WIDTH = 256
"""Default of Gemma 3's query_pre_attn_scalar."""
HEAD_WIDTHS = {"qwen3": 128, "gemma": 256, "gemma3_text": 256}
"""Default of head_dim; of the others it is hidden_size / num_attention_heads."""
FIXED: Mapping[str, Any] = {
    "attention_bias": False,
    "mlp_bias": False,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
    "use_bidirectional_attention": False,
    "partial_rotary_factor": 1.0,
    "rope_interleaved": False,
    "use_mrope": False,
    "pruned_heads": {},
    "is_encoder_decoder": False,
    "cross_attention_hidden_size": None,
    **dict.fromkeys(huggingface_keys.QUANTIZATION),
}
"""Settings of config.json that the decoder has no key for, with the values that it computes."""
_TOKENIZER_FILE = re.compile(r"token|tekken|vocab|merges|spiece|sentencepiece|\.bpe|\.model$")
WITH_TOKENIZER = (*kinds_of(TextualSource), "mixture")
"""Kinds of data.source that a tokenizer reads."""
FACTS = (
    "norm",
    "activation",
    "positions",
    "scale_embeddings",
    "rope_scaling",
    "sliding_window",
    "full_attention_every",
    "sliding_rope_theta",
)
"""Keys of the model section that change the numbers and not the arrays; only later than others."""


def of_text(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the part of a config.json that is about text, of a model that has others too."""
    below = fields.get("text_config")
    if not isinstance(below, Mapping) or "hidden_size" in fields:
        return fields
    outer = {k: v for k, v in fields.items() if k not in huggingface_keys.OTHER_PARTS}
    return {**outer, **below}


def model_of(fields: Mapping[str, Any]) -> tuple[GptModel, dict[str, Any]]:
    """Returns the decoder that a config.json describes, and settings that it does not support.

    The latter are settings of config.json, under their names there.

    Raises:
      ConfigError: it is of another family, or incomplete.
    """
    family = str(fields.get("model_type"))
    if family not in STYLES:
        raise ConfigError(
            f"config.json: model_type {family!r} is not one of those that jaxres can compute: "
            f"{', '.join(STYLES)}. Write it as a custom model (docs/models.md)."
        )
    unsupported = {
        key: fields[key] for key, ours in FIXED.items() if fields.get(key, ours) not in (ours, None)
    }
    try:
        read = _gpt2 if family == "gpt2" else _rotary
        section, more = read(family, fields)
        model = GptModel.model_validate({**STYLES[family], **section})
        unsupported |= huggingface_keys.unknown(family, fields, compared=FIXED)
    except ValidationError as error:
        wrong = [f"{row['loc'][-1]}: {row['msg']}" for row in error.errors()]
        raise ConfigError(f"config.json: not a complete config ({'; '.join(wrong)})") from error
    except (KeyError, ValueError, TypeError, AttributeError, ArithmeticError) as error:
        what = f"model_type {family!r}: {type(error).__name__}: {error}"
        raise ConfigError(f"config.json: not a complete config ({what})") from error
    return model, unsupported | more


def _rotary(family: str, fields: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the model section and unsupported settings of a family with rotary positions."""
    width, heads = fields["hidden_size"], fields["num_attention_heads"]
    head_width = fields.get("head_dim") or HEAD_WIDTHS.get(family, width // heads)
    is_gemma = family.startswith("gemma")
    act = fields.get("hidden_act", "silu")
    if is_gemma:
        act = fields.get("hidden_activation") or "gelu_pytorch_tanh"
    section = {
        "num_layers": fields["num_hidden_layers"],
        "d_model": width,
        "num_heads": heads,
        "num_kv_heads": fields.get("num_key_value_heads", KV_HEADS.get(family)) or heads,
        "head_dim": None if head_width * heads == width else head_width,
        "d_ff": fields["intermediate_size"],
        "vocab_size": fields["vocab_size"],
        "tie_embeddings": fields.get("tie_word_embeddings", is_gemma),
        "activation": ACTIVATIONS.get(act, "silu"),
        "norm_eps": float(fields.get("rms_norm_eps", 1e-6)),
    }
    unsupported = {} if act in ACTIVATIONS else {"hidden_act": act}
    if is_gemma and fields.get("hidden_act", "gelu") not in (*GELUS, None):
        unsupported["hidden_act"] = fields["hidden_act"]
    score_width = fields.get("query_pre_attn_scalar", SCORE_WIDTH)
    if family == "gemma3_text" and score_width != head_width:
        unsupported["query_pre_attn_scalar"] = score_width
    windows = _windows(family, fields, unsupported)
    return section | windows | _rope(family, fields, unsupported, windows), unsupported


def _windows(family: str, fields: Mapping[str, Any], unsupported: dict[str, Any]) -> dict[str, Any]:
    """Returns the section's keys about sliding windows; adds unsupported settings."""
    window = fields.get("sliding_window", WINDOWS.get(family))
    num_layers = fields["num_hidden_layers"]
    is_qwen = family.startswith("qwen")
    if family in ("llama", "gemma"):
        return {}
    if is_qwen and not fields.get("use_sliding_window", False):
        window = None
    key, kinds = _layer_kinds(family, fields, window)
    if len(kinds) != num_layers or set(kinds) - LAYER_KINDS:
        unsupported[key] = kinds
        return {}
    full = [n for n, kind in enumerate(kinds, start=1) if kind == FULL]
    if family == "mistral" and len(full) != (num_layers if window is None else 0):
        unsupported[key] = kinds  # Its class ignores this: all layers have the window.
    if len(full) == num_layers:
        return {}
    if window is None:
        unsupported |= {"sliding_window": None, key: fields.get(key)}
        return {}
    every = full[0] if full else None
    if family == "gemma3_text" and key != "layer_types":
        every = _pattern(fields)
        if fields.get("_sliding_window_pattern", every) != every:
            unsupported["_sliding_window_pattern"] = fields["_sliding_window_pattern"]
    elif every and full != list(range(every, num_layers + 1, every)):
        unsupported[key] = fields.get(key, FULL_BEFORE)
    return {"sliding_window": window} | ({"full_attention_every": every} if every else {})


def _layer_kinds(
    family: str, fields: Mapping[str, Any], window: int | None
) -> tuple[str, list[str]]:
    """Returns the kind of attention of each layer, and the key of config.json that says it."""
    num_layers, kinds = fields["num_hidden_layers"], fields.get("layer_types")
    if kinds is not None:
        return "layer_types", kinds
    if family == "gemma3_text":
        every = _pattern(fields)
        return "sliding_window_pattern", layer_kinds(num_layers, has_window=True, every=every)
    if window is None or family == "mistral":
        return "sliding_window", layer_kinds(num_layers, has_window=window is not None)
    num_full = fields.get("max_window_layers", FULL_BEFORE)
    return "max_window_layers", [FULL if n < num_full else SLIDING for n in range(num_layers)]


def layer_kinds(num_layers: int, *, has_window: bool, every: int | None = None) -> list[str]:
    """Returns the kind of attention of each layer; with a window every n-th layer is full."""
    if not has_window:
        return [FULL] * num_layers
    if every is None:
        return [SLIDING] * num_layers
    return [SLIDING if n % every else FULL for n in range(1, num_layers + 1)]


def _pattern(fields: Mapping[str, Any]) -> int:
    """Returns the n for which every n-th layer of a Gemma 3 model has full attention."""
    return int(fields.get("sliding_window_pattern", 6))


def _rope(
    family: str,
    fields: Mapping[str, Any],
    unsupported: dict[str, Any],
    windows: Mapping[str, Any],
) -> dict[str, Any]:
    """Returns the section's keys about rotary angles; adds unsupported settings."""
    is_gemma3 = family == "gemma3_text"
    scaling = fields.get("rope_scaling") or {}
    rope = fields.get("rope_parameters") or {}  # Written by transformers 5.
    full = (rope.get("full_attention") or {}) if is_gemma3 else rope
    local = (rope.get("sliding_attention") or {}) if is_gemma3 else {}
    if is_gemma3 and rope.keys() - LAYER_KINDS:
        unsupported["rope_parameters"] = rope
    theta = _agreed("rope_theta", (scaling, full, fields), unsupported)
    section: dict[str, Any] = {
        "rope_theta": float((1e6 if is_gemma3 else 10_000.0) if theta is None else theta)
    }
    for part in (scaling, full, local):
        known = huggingface_keys.ROPE_READ.get(_kind(part), frozenset[str]())
        if {key for key, value in part.items() if value is not None} - known:
            unsupported["rope_scaling"] = part
        if (part.get("partial_rotary_factor") or 1.0) != 1.0:
            unsupported["partial_rotary_factor"] = part["partial_rotary_factor"]
    if scaling and full and _scaled(scaling) != _scaled(full):
        unsupported |= {"rope_scaling": scaling, "rope_parameters": full}
    if _kind(local) != "default":
        unsupported["rope_scaling"] = local
    section |= _scaling_section(scaling or full, unsupported)
    if is_gemma3 and windows:
        base = {"rope_theta": fields.get("rope_local_base_freq")}
        local_theta = _agreed("rope_theta", (local, base), unsupported)
        section["sliding_rope_theta"] = float(10_000.0 if local_theta is None else local_theta)
    return section


def _scaling_section(scaling: Mapping[str, Any], unsupported: dict[str, Any]) -> dict[str, Any]:
    """Returns the section's key about scaled angles; adds a kind that is unsupported."""
    if _kind(scaling) == "linear":
        return {"rope_scaling": LinearScaling(kind="linear", factor=float(scaling["factor"]))}
    if _kind(scaling) == "llama3":
        llama3 = Llama3Scaling(
            kind="llama3",
            factor=float(scaling["factor"]),
            low_freq_factor=float(scaling["low_freq_factor"]),
            high_freq_factor=float(scaling["high_freq_factor"]),
            original_max_positions=scaling["original_max_position_embeddings"],
        )
        return {"rope_scaling": llama3}
    if _kind(scaling) != "default":
        unsupported["rope_scaling"] = scaling
    return {}


def _agreed(
    key: str, parts: Sequence[Mapping[str, Any]], unsupported: dict[str, Any]
) -> float | None:
    """Returns a setting that several places may have; adds it if they have different values."""
    found = [part[key] for part in parts if part.get(key) is not None]
    if len(set(found)) > 1:
        unsupported[key] = found
    return found[0] if found else None


def _scaled(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the scaling of the angles in a rope setting, without keys that are compared apart."""
    others = ("type", "rope_type", "rope_theta", "partial_rotary_factor")
    numbers = {key: x for key, x in rope.items() if key not in others and x is not None}
    return {**numbers, "kind": _kind(rope)}


def _kind(rope: Mapping[str, Any]) -> str:
    return str(rope.get("rope_type") or rope.get("type") or "default")


def _gpt2(family: str, fields: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the model section and unsupported settings of a GPT-2."""
    act = fields.get("activation_function", "gelu_new")
    section = {
        "num_layers": fields["n_layer"],
        "d_model": fields["n_embd"],
        "num_heads": fields["n_head"],
        "d_ff": fields.get("n_inner") or 4 * fields["n_embd"],
        "vocab_size": fields["vocab_size"],
        "max_positions": fields.get("n_positions", 1024),
        "tie_embeddings": fields.get("tie_word_embeddings", True),
        "activation": ACTIVATIONS.get(act, "gelu_tanh"),
        "norm_eps": float(fields.get("layer_norm_epsilon", 1e-5)),
    }
    return section, {} if act in ACTIVATIONS else {"activation_function": act}


def resolve(config: Node) -> tuple[Node, list[Problem]]:
    """Replaces `model: {kind: huggingface}` by the folder's settings; returns its problems.

    These are the model's sizes, and, unless they are given, init_from and data.tokenizer.
    """
    section = config.value.get("model") if isinstance(config.value, dict) else None
    given = section.value if section is not None and isinstance(section.value, dict) else {}
    if "kind" not in given or given["kind"].value != "huggingface" or "path" not in given:
        return config, _unchosen_tokenizer(config) if isinstance(config.value, dict) else []
    at = given["path"]
    try:
        named = parse_path(str(plain(at)))
        folder = normalized(named)
        model = _from_folder(folder)
    except (ConfigError, ValueError, OSError) as error:
        return config, [Problem("model.path", str(error), at.where)]
    sizes = {key: _node(value, at.where) for key, value in model.items()}
    own = {key: node for key, node in given.items() if key not in ("kind", "path")}
    top = {**config.value, "model": Node({**sizes, **own}, section.where if section else "")}
    problems = list[Problem]()
    weights = top.get("init_from", Node({}, at.where))
    is_own = isinstance(weights.value, dict) and not {"kind", "path"} & weights.value.keys()
    if is_own:
        own_path = _node({"kind": "safetensors", "path": str(named)}, at.where)
        top["init_from"] = Node({**own_path.value, **weights.value}, weights.where)
        if not _holds(folder, "model.safetensors", "model.safetensors.index.json"):
            text = (
                f"{folder}: no model.safetensors or model.safetensors.index.json here. Other "
                "files of weights are not read: save the model as safetensors, or train from the "
                "seed with init_from={kind: seed}"
            )
            problems.append(Problem("model.path", text, at.where))
    data = top.get("data")
    if data is not None and _text_source(data) and _holds(folder, "tokenizer.json"):
        own_path = _node({"kind": "huggingface", "path": str(named)}, at.where)
        more = data.value.get("tokenizer", Node({}, at.where))
        if isinstance(more.value, dict) and not {"kind", "path"} & more.value.keys():
            tokenizer = Node({**own_path.value, **more.value}, more.where)
            top["data"] = Node({**data.value, "tokenizer": tokenizer}, data.where)
    resolved = Node(top, config.where)
    return resolved, problems + _unchosen_tokenizer(resolved)


def _text_source(data: Node) -> str | None:
    """Returns the kind of a data section's source if a tokenizer reads it; default: text."""
    if not isinstance(data.value, dict):
        return None
    name = _kind_of(data.value.get("source"))
    return name if name in WITH_TOKENIZER else None


def _kind_of(source: Node | Any) -> Any:
    value = plain(source) if isinstance(source, Node) else source
    return value.get("kind", "text") if isinstance(value, dict) else "text"


def _has_text(source: Node | None) -> bool:
    """Returns whether a source, or a part of a mixture, is tokenised: it may be of tokens alone."""
    if source is None or _kind_of(source) != "mixture":
        return True
    parts = plain(source).get("sources")
    return isinstance(parts, list) and any(
        isinstance(part, dict) and _kind_of(part.get("source")) in WITH_TOKENIZER for part in parts
    )


def _unchosen_tokenizer(config: Node) -> list[Problem]:
    """Returns a problem if text would be trained on as bytes, with weights of unknown tokens."""
    data, weights = config.value.get("data"), config.value.get("init_from")
    source = None if data is None else _text_source(data)
    if data is None or source is None or not isinstance(weights and weights.value, dict):
        return []
    kind, path = weights.value.get("kind"), weights.value.get("path")
    if "tokenizer" in data.value or not _has_text(data.value.get("source")):
        return []
    if not _is(kind, "safetensors") or path is None or _accepts_tokenizer(weights):
        return []
    try:
        place = normalized(parse_path(str(plain(path))))
        folder = files.folder_of(place)
        # An export of jaxres with its own names has no tokenizer; the start says so.
        is_known = _holds(folder, "tokenizer.json", "jaxres.json") or not files.exists(place)
    except (ConfigError, ValueError, OSError):
        return []  # What reads the weights says what is wrong with their path.
    text = _unknown_tokenizer(folder)
    return [] if is_known else [Problem("data.tokenizer", text, path.where)]


def _unknown_tokenizer(folder: RunPath) -> str:
    """Returns the error for weights whose tokenizer is not known, with its remedies."""
    names = sorted(name for name in files.list_names(folder) if _TOKENIZER_FILE.search(name))
    convert = (
        f"`AutoTokenizer.from_pretrained({str(folder)!r}).save_pretrained({str(folder)!r})` of "
        "Hugging Face's transformers writes one"
    )
    return (
        f"{folder}: its weights are of the tokens of a tokenizer that is not known: there is no "
        f"tokenizer.json (of a tokenizer there is: {', '.join(names) or 'nothing'}). {convert}; or "
        "give the model's tokenizer by data.tokenizer; if its tokens are bytes, "
        "data.tokenizer={kind: bytes}"
    )


def _accepts_tokenizer(init_from: Node) -> bool:
    changed = init_from.value.get("allow_changed")
    return isinstance(changed and changed.value, list) and "tokenizer" in changed.value


def _is(node: Node | None, value: str) -> bool:
    return node is not None and node.value == value


def _from_folder(folder: RunPath) -> dict[str, Any]:
    """Returns the model section of a folder. Raises ConfigError with the cause."""
    data = files.read(folder / "config.json")
    if data is None:
        raise ConfigError(f"{folder}: no config.json here; give the folder of a downloaded model")
    files.refuse_lfs_pointer(data, folder / "config.json")
    try:
        fields = foreign_json.loads(data)
        if not isinstance(fields, dict):
            raise TypeError("it is no JSON object")
        model, unsupported = model_of(of_text(fields))
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"{folder / 'config.json'}: can't be read ({error})") from error
    if unsupported:
        raise ConfigError(f"config.json: {huggingface_keys.cannot_compute(unsupported)}")
    return shown(model)


def shown(model: GptModel) -> dict[str, Any]:
    """Returns the keys of a decoder's `model` section that a folder defines."""
    names = ("num_layers", "d_model", "num_heads", "num_kv_heads", "d_ff", "vocab_size")
    others = ("tie_embeddings", "rope_theta", "norm_eps")
    section = {"kind": "gpt"} | {name: getattr(model, name) for name in (*names, *others)}
    changed = model.model_dump(mode="json", exclude_defaults=True)
    return section | {key: value for key, value in changed.items() if key not in section}


def _holds(folder: RunPath, *names: str) -> bool:
    return any(files.file_exists(folder / name) for name in names)


def _node(value: Any, where: str) -> Node:
    if isinstance(value, dict):
        return Node({key: _node(child, where) for key, child in value.items()}, where)
    return Node(value, where)
