"""A user's loop that tests interrupt: FOLDER LAST; it imports no Flax, so it starts soon.

With HOLD="STEP:PATH" it makes PATH.held after `finished` of that step, and waits until PATH.go is
there. PACE is the seconds between two steps. On several hosts its state is spread over all devices.
"""

import os
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

import jaxres


@jax.jit
def train_step(state, row):
    """Mixes the state with the row and a random number."""
    key, own = jax.random.split(state["key"])
    noise = jax.random.normal(own, state["w"].shape)
    w = 0.9 * state["w"] + 0.1 * noise + jnp.sin(row)
    return {"w": w, "key": key, "n": state["n"] + 1}, jnp.mean(w**2)


train_step = jax.jit(train_step, donate_argnums=0)


def make_state():
    mesh = jax.sharding.Mesh(jax.devices(), "all")
    place = NamedSharding(mesh, PartitionSpec())
    places = {"w": NamedSharding(mesh, PartitionSpec("all")), "key": place, "n": place}

    def state():
        return {"w": jnp.zeros(2**16), "key": jax.random.key(0), "n": jnp.int32(0)}

    return jax.jit(state, out_shardings=places)()


def main(folder, last):
    hold_at, _, place = os.environ.get("HOLD", "").partition(":")
    pace = float(os.environ.get("PACE", "0"))
    settings = {} if "JAXRES_ATTEMPT_NUMBER" in os.environ else {"save_every_steps": 5}
    with jaxres.attempt(folder, **settings) as attempt:
        state, row, start = attempt.restore_or(make_state, position=0)
        for step in attempt.steps(start, int(last)):
            state, loss = train_step(state, row)
            row += 3
            attempt.finished(step, state, metrics={"loss": loss}, position=row)
            time.sleep(pace)
            if str(step) == hold_at:
                Path(f"{place}.held").touch()
                while not Path(f"{place}.go").exists():
                    time.sleep(0.01)
    print("the program goes on")


if __name__ == "__main__":
    main(*sys.argv[1:])
