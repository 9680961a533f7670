"""TensorZero's gateway, embedded in a Python process: serves HTTP and prints where. Usage: serve_tensorzero.py CONFIG."""

import os
import signal
import sys

from openai import OpenAI
from tensorzero import patch_openai_client

os.environ.setdefault("OPENAI_API_KEY", "none")
client = OpenAI(api_key="none")
patch_openai_client(client, config_file=sys.argv[1], async_setup=False)
print(client.base_url, flush=True)
signal.pause()
