"""A user's loop that tests interrupt: FOLDER LAST [HOLD_AT]; it imports no Flax, so it starts soon.

After `finished` of step HOLD_AT it makes FOLDER.held, and waits until FOLDER.go is there.
"""

import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp

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
    return {"w": jnp.zeros(2**16), "key": jax.random.key(0), "n": jnp.int32(0)}


def main(folder, last, hold_at=0):
    with jaxres.attempt(folder, save_every_steps=5) as attempt:
        state, row, start = attempt.restore_or(make_state, position=0)
        for step in attempt.steps(start, int(last)):
            state, loss = train_step(state, row)
            row += 3
            attempt.finished(step, state, metrics={"loss": loss}, position=row)
            if step == int(hold_at):
                Path(f"{folder}.held").touch()
                while not Path(f"{folder}.go").exists():
                    time.sleep(0.01)
    print("the program goes on")


if __name__ == "__main__":
    main(*sys.argv[1:])
