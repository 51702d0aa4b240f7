"""An OpenAI-compatible gateway that places requests on vLLM workers by prefix affinity."""

__version__ = "0.1.0"
