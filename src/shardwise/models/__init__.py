"""GPT-2 and Llama as plain NNX modules, their losses, and sampling."""

from shardwise.models import gpt as gpt
from shardwise.models import llama as llama
from shardwise.models import loss as loss
from shardwise.models import sampling as sampling
