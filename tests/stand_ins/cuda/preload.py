"""Stand-in for CUDA in the process that ranks are forked from: imported there before torch."""

from tests.stand_ins.cuda.begin import begin

begin()
