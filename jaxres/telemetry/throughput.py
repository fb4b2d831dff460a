"""Tokens per second, and model FLOP/s as a share of the devices' peak (MFU)."""

from __future__ import annotations

from jaxres.runlog.events import RunBuilt

PEAK_FLOPS = {
    "NVIDIA A100": 312e12,
    "NVIDIA H100": 989e12,
    "NVIDIA H200": 989e12,
    "NVIDIA L4": 121e12,
}
"""Dense bfloat16 peak in FLOP/s by prefix of the device kind; NVIDIA's data sheets (SXM parts)."""


def peak_flops(device_kind: str) -> float | None:
    """Returns a device's peak in FLOP/s, or None if it is unknown.

    >>> peak_flops("NVIDIA H100 80GB HBM3"), peak_flops("cpu")
    (989000000000000.0, None)
    """
    return next((v for k, v in PEAK_FLOPS.items() if device_kind.startswith(k)), None)


def peak_seconds(built: RunBuilt) -> float | None:
    """Returns the time of a step at the peak of all devices, attention in full; None: unknown."""
    count, _, kind = built.devices.partition(" x ")
    peak = peak_flops(kind)
    if peak is None:
        return None
    return built.flops_per_token * built.tokens_per_step / (peak * int(count))


def tokens_per_second(built: RunBuilt, step_seconds: float) -> float:
    """Returns the tokens that all devices together train on per second; 0 for unknown seconds."""
    return built.tokens_per_step / step_seconds if step_seconds else 0.0


def utilization_text(built: RunBuilt, step_seconds: float) -> str:
    """Returns the MFU, or FLOP/s if the peak is unknown.

    PaLM counts attention in full (arXiv 2204.02311, appendix B); MaxText and Megatron count the
    half of it that a causal mask leaves, which is named too where it differs.

    >>> model = {"flops_per_token": 4e9, "attention_flops_per_token": 1e9}
    >>> sizes = {"params": 1, "rows": 9, "tokens_per_epoch": 9, "steps": 9, "tokens_per_step": 1000}
    >>> devices = "8 x NVIDIA H100 80GB HBM3"
    >>> built = RunBuilt("gpt", devices=devices, state_bytes_per_device=9, **sizes, **model)
    >>> utilization_text(built, 0.001)
    'MFU 50.6% (44.2% causal)'
    """
    if not step_seconds:
        return ""
    tokens = tokens_per_second(built, step_seconds)
    flops_per_second = built.flops_per_token * tokens
    count, _, kind = built.devices.partition(" x ")
    peak = peak_flops(kind)
    if peak is None:
        return f"{flops_per_second / 1e9:,.1f} GFLOP/s"
    text = f"MFU {flops_per_second / (peak * int(count)):.1%}"
    if not built.attention_flops_per_token:
        return text
    causal = flops_per_second - built.attention_flops_per_token * tokens / 2
    return f"{text} ({causal / (peak * int(count)):.1%} causal)"
