"""placeholder"""

NATIVE = "native_fp32"


def chapter(folder, out):
    return ""
