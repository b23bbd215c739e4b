"""`interp_prox_linear`: the mixture of mu and pi. Free, and tells little apart."""

from unstale.algorithms import proximal
from unstale.old_logps.interp_prox_loglinear import InterpProxLoglinear


class InterpProxLinear(InterpProxLoglinear):
    """`prox = log((1 - alpha) mu + alpha pi)`, formed anew in every training pass. Never exact."""

    _between = staticmethod(proximal.linear)
