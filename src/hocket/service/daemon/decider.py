"""Applies batches of commands to the state and commits the result, without threads.

Responses of a batch are given only after its commit. If the commit fails, the state stays
unchanged, so no user has seen a response that is wrong afterwards.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from hocket.base.errors import HocketError
from hocket.service.daemon.clock import Clock
from hocket.service.daemon.decision_log import DecisionLog
from hocket.service.daemon.service_state import ServiceState
from hocket.service.daemon.transaction import Transaction
from hocket.service.errors import UnavailableError
from hocket.service.store.store import Store
from hocket.service.store.tables import Batch

Command = Callable[[Transaction], Any]


@dataclass(frozen=True, eq=False)
class Request:
    """A command and the future of its result."""

    command: Command
    future: Future[Any] = field(default_factory=Future)


class Decider:
    """Owns the state and the store; one thread at a time may call `decide`."""

    def __init__(self, service_state: ServiceState, store: Store, clock: Clock) -> None:
        self.service_state = service_state
        self.on_commit: Callable[[ServiceState, Batch], None] = lambda service_state, batch: None
        """Called after each commit, before its answers."""
        self._store = store
        self._clock = clock
        self._log = DecisionLog(store.folder)

    def decide(self, requests: Sequence[Request]) -> None:
        """Execute commands in one transaction and answer them."""
        try:
            self._decide(requests)
        except HocketError as error:
            _fail_all(requests, error)
        except Exception as error:
            # A failing command must neither fail the other commands of the batch nor leave a
            # partial change, so each is tried alone.
            if len(requests) > 1:
                for request in requests:
                    self.decide([request])
            elif isinstance(error, _HalfDoneError):
                _fail_all(requests, error.why)
            else:
                _fail_all(requests, UnavailableError(f"internal error: {error!r}"), error)

    def _decide(self, requests: Sequence[Request]) -> None:
        transaction = Transaction(self.service_state, self._clock.now_s(), _new_token)
        answers = [(request, _answer(request, transaction)) for request in requests]
        if transaction.is_changed:
            self._commit(transaction)
        for request, answer in answers:
            if isinstance(answer, HocketError):
                request.future.set_exception(answer)
            else:
                request.future.set_result(answer)

    def _commit(self, transaction: Transaction) -> None:
        service_state, batch = transaction.finish()
        self._store.commit(batch)
        self.service_state = service_state
        self._log.write(transaction.time_s, transaction.decisions)
        self.on_commit(service_state, batch)


class _HalfDoneError(Exception):
    """A command was refused after it had changed the transaction, which must be discarded."""

    def __init__(self, why: HocketError) -> None:
        super().__init__(str(why))
        self.why = why


def _answer(request: Request, transaction: Transaction) -> Any:
    num_changes = transaction.num_changes
    try:
        return request.command(transaction)
    except HocketError as error:
        if transaction.num_changes != num_changes:
            raise _HalfDoneError(error) from None
        return error


def _fail_all(
    requests: Sequence[Request], error: HocketError, cause: Exception | None = None
) -> None:
    for request in requests:
        if not request.future.done():
            error.__cause__ = cause
            request.future.set_exception(error)


def _new_token() -> str:
    return secrets.token_urlsafe(24)
