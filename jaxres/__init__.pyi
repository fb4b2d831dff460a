from jaxres.own_loop.calls import attempt as attempt
from jaxres.own_loop.calls import checkpoints as checkpoints
from jaxres.python_api import LoadedModel as LoadedModel
from jaxres.python_api import Run as Run
from jaxres.python_api import branch as branch
from jaxres.python_api import load_model as load_model
from jaxres.python_api import runs as runs
from jaxres.python_api import train as train

__version__: str
