"""Python programs that nobody has read, run in a sandbox. Linux only; imports the standard library and `leanroll.errors`.

`run` is the side of the caller. The other modules but `checks` run in the sandboxed interpreter before the program does; what they
import is paid for by every program, so they import little, and this file nothing.
"""
