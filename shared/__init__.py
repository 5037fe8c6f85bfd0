"""What every service shares: messages, the actor contract, identities, sizes, configuration and places.

Imports nothing else of the project. Owns no state of any request, block or model.
"""
