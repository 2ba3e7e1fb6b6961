"""The sampler audit: acceptance rules and processing against exact laws and plain draws."""

from treejax.audit.sampler.audit import Settings, detect, run, samplers_of
from treejax.audit.sampler.settings import name_of

__all__ = ["Settings", "detect", "name_of", "run", "samplers_of"]
