"""Eight virtual CPU devices, set before any test initialises a backend."""

import jax
from jaxtyping import install_import_hook

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
# Every shape annotation of the models is checked in every test; imports of jaxres come after this.
install_import_hook("jaxres.models", "beartype.beartype")
