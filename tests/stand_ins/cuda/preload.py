"""Load the CUDA stand-in in the process that ranks fork from, before torch."""

from tests.stand_ins.cuda.begin import begin

begin()
