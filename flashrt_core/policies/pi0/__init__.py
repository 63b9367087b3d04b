"""Pi0 and Pi0.5: SigLIP vision, Gemma prefix, action expert, flow matching.

Sources: arXiv 2410.24164 and 2504.16054. The two share all but the expert's norms and the way of
the state: ``model`` and ``fast`` are Pi0's forward pass, ``pi05`` and ``pi05_fast`` Pi0.5's.
"""

from flashrt_core.policies.normalise import Statistics
from flashrt_core.policies.pi0.bind import Pi0Policy
from flashrt_core.policies.pi0.config import load_config
from flashrt_core.policies.pi0.config import Pi0Config
from flashrt_core.policies.pi0.session import Pi0Session

__all__ = ['Pi0Config', 'Pi0Policy', 'Pi0Session', 'Statistics', 'load_config']
