"""A client of `nestrec serve`, for programs that ask it: `Client` and `AsyncClient` (pip install 'nestrec[client]')."""

from nestrec.client.attempts import RequestError as RequestError
from nestrec.client.attempts import ServerBusyError as ServerBusyError
from nestrec.client.clients import AsyncClient as AsyncClient
from nestrec.client.clients import Client as Client
from nestrec.client.clients import UserHistory as UserHistory
