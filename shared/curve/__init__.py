"""The front over TCP: key pairs, the list of client keys that may come in, who judges a handshake, the door itself.

CURVE encrypts and proves both ends; the list under PERDURE_HOME says which client keys are welcome and whose they are.
"""
