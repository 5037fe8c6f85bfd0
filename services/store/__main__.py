"""`python -m services.store`."""

from services.store.actor import Store
from shared.actor import run

if __name__ == "__main__":
    run(Store)
