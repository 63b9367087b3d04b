"""Pi0: SigLIP vision, Gemma prefix, action expert, flow matching (arXiv 2410.24164)."""

from flashrt_core.policies.pi0.bind import Pi0Policy
from flashrt_core.policies.pi0.config import load_config
from flashrt_core.policies.pi0.config import Pi0Config
from flashrt_core.policies.pi0.config import Statistics
from flashrt_core.policies.pi0.session import Pi0Session

__all__ = ['Pi0Config', 'Pi0Policy', 'Pi0Session', 'Statistics', 'load_config']
