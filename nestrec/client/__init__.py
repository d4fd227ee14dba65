"""A client of `nestrec serve`, for programs that ask it: `Client` and `AsyncClient` (pip install 'nestrec[client]')."""

from nestrec.client.attempts import AskError as AskError
from nestrec.client.attempts import BusyError as BusyError
from nestrec.client.clients import AsyncClient as AsyncClient
from nestrec.client.clients import Client as Client
from nestrec.client.clients import UserHistory as UserHistory
