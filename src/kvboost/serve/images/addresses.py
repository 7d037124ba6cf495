"""Which addresses images are fetched from: the hosts that the operator allows, the IP addresses
that may be behind their names, and whose certificates prove the names."""

from __future__ import annotations

import ipaddress
import os
import re
import ssl
from collections.abc import Iterable
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network

import httpx

from kvboost.errors import ConfigError

IPAddress = IPv4Address | IPv6Address

LONGEST_URL = 8192
_NO_URL = (httpx.InvalidURL, ValueError)
"""What httpx raises for text that is no address."""
_PORTS = {"http": 80, "https": 443}
_LABEL = r"(?!-)[a-z0-9_-]{1,63}(?<!-)"
_NAME = re.compile(rf"(?!(.*\.)?(\d+|0x[0-9a-f]*)$)({_LABEL}\.)*{_LABEL}", re.ASCII)
"""No name ends with a number: resolvers take 2130706433, 0x7f000001 and 127.1 for 127.0.0.1."""
_UNICAST = IPv6Network("2000::/3")
_NAT64 = IPv6Network("64:ff9b::/96")
_NOT_PUBLIC = (
    IPv4Network("192.0.0.0/24"),  # Oracle's metadata; ipaddress takes most of it for public
    IPv4Network("168.63.129.16/32"),  # Azure's
)


class AddressRefused(Exception):
    """Nothing is fetched from this address. The message says what it must be."""


@dataclass(frozen=True)
class RemoteUrl:
    """The checked address of an image, in parts."""

    scheme: str
    host: str
    """A name in lower case and ASCII, without a dot at its end, or an IP address."""
    port: int
    target: str
    """Path and query."""

    @classmethod
    def of(cls, url: str) -> RemoteUrl:
        """The parts of ``url``. Raises AddressRefused if it is no plain address of a web server."""
        if len(url) > LONGEST_URL:
            raise _too_long(len(url))
        try:
            parts = httpx.URL(url)
        except _NO_URL:
            raise AddressRefused("must be a valid address") from None
        if len(parts.raw_path) > LONGEST_URL:  # each other character has become up to twelve
            raise _too_long(len(parts.raw_path))
        if parts.scheme not in _PORTS:
            raise AddressRefused("must begin with https:// or http://")
        if parts.userinfo:
            raise AddressRefused("must have no user name and no password")
        host = _plain_host(parts.raw_host.decode("ascii"))
        port = _PORTS[parts.scheme] if parts.port is None else parts.port
        if host is None or not 0 < port < 65536:
            raise AddressRefused("must be a valid address")
        return cls(parts.scheme, host, port, parts.raw_path.decode("ascii"))

    @property
    def has_own_port(self) -> bool:
        """Whether the port is not that of the scheme."""
        return self.port != _PORTS[self.scheme]

    @property
    def host_header(self) -> str:
        """The value of the header ``Host``."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}" if self.has_own_port else host

    @property
    def ip(self) -> IPAddress | None:
        """The host, if it is an IP address."""
        return _ip_of(self.host)

    def at(self, host: str) -> httpx.URL:
        """The same on ``host``, which may be the IP address that the name has now."""
        return httpx.URL(
            scheme=self.scheme, host=host, port=self.port, raw_path=self.target.encode("ascii")
        )

    def redirected(self, location: str) -> RemoteUrl:
        """Where a redirect leads. Raises AddressRefused if it is no address of a web server, or if
        it leads from https to http."""
        try:
            url = self.at(self.host).join(location)
        except _NO_URL:
            raise AddressRefused("must be a valid address") from None
        found = self.of(str(url))
        if self.scheme == "https" and found.scheme == "http":
            raise AddressRefused("must begin with https://, as the address before it does")
        return found


@dataclass(frozen=True)
class _Rule:
    """A host that the operator allows."""

    host: str
    with_subdomains: bool
    port: int | None
    """None: that of the scheme."""

    @classmethod
    def of(cls, given: str) -> _Rule:
        name, port = given.strip(), None
        if _ip_of(name) is None:
            before, colon, after = name.rpartition(":")
            if colon:
                if not (after.isascii() and after.isdigit() and 0 < int(after[:6]) < 65536):
                    raise _mistake(given)
                name, port = before, int(after)
        with_subdomains = name.startswith("*.")
        host = _plain_host(_in_ascii(name.removeprefix("*.").strip("[]")))
        if host is None or (with_subdomains and _ip_of(host) is not None):
            raise _mistake(given)
        return cls(host, with_subdomains, port)

    def allows(self, url: RemoteUrl) -> bool:
        if url.has_own_port if self.port is None else url.port != self.port:
            return False
        if self.with_subdomains:
            return url.host.endswith(f".{self.host}")
        return url.host == self.host


class ImageHosts:
    """The hosts that the operator allows."""

    def __init__(self, given: Iterable[str]) -> None:
        """``given``: names such as ``images.example.com`` or ``*.example.com``, which means all
        names that end like it, and IP addresses, each with a port if it is not that of http or
        https. Raises ConfigError if one is none of these."""
        self._rules = [_Rule.of(one) for one in given]
        for rule in self._rules:
            if (ip := _ip_of(rule.host)) is not None and (ip.is_multicast or ip.is_unspecified):
                raise _mistake(rule.host)

    def check(self, url: str) -> RemoteUrl:
        """The parts of an address. Raises AddressRefused unless it is on an allowed host."""
        return self.check_host(RemoteUrl.of(url))

    def check_host(self, url: RemoteUrl) -> RemoteUrl:
        """``url``. Raises AddressRefused unless it is on an allowed host."""
        if not any(rule.allows(url) for rule in self._rules):
            raise AddressRefused("must be on a host that this server's operator allows")
        return url

    def problem(self, url: str) -> str | None:
        """Why nothing is fetched from ``url``; None if it may be fetched."""
        try:
            self.check(url)
        except AddressRefused as error:
            return str(error)
        return None

    def may_connect(self, url: RemoteUrl, ip: IPAddress) -> bool:
        """Whether ``url``, whose host may be fetched from, may be fetched from ``ip``. Addresses
        that are not public must be allowed themselves, not only a name for them: whoever owns a
        name decides what it means."""
        listed = RemoteUrl(url.scheme, str(plain_ip(ip)), url.port, url.target)
        return is_public(ip) or any(rule.allows(listed) for rule in self._rules)


def is_public(ip: IPAddress) -> bool:
    """Whether ``ip`` is a machine on the internet: not this one, not in a private network, not
    metadata of a cloud, and not a group of machines."""
    if (inner := _ipv4_in(ip)) is not None:
        return is_public(inner)
    if isinstance(ip, IPv6Address):
        return ip in _UNICAST and ip.is_global
    return ip.is_global and not ip.is_multicast and not any(ip in one for one in _NOT_PUBLIC)


def trusted_authorities() -> ssl.SSLContext:
    """Those of certifi, or those in ``SSL_CERT_FILE``. Raises ConfigError if it cannot be read."""
    try:
        return httpx.create_ssl_context()
    except OSError as error:  # ssl.SSLError is one, and none names the file
        file = os.environ.get("SSL_CERT_FILE", "")
        said = f"images cannot be fetched: {error}; check SSL_CERT_FILE={file!r}"
        raise ConfigError(said) from None


def plain_ip(ip: IPAddress) -> IPAddress:
    """``ip``, as IPv4 if it only is written as IPv6."""
    mapped = ip.ipv4_mapped if isinstance(ip, IPv6Address) else None
    return ip if mapped is None else mapped


def _ipv4_in(ip: IPAddress) -> IPv4Address | None:
    """The address that a packet to an IPv6 address reaches in the end, if that is an IPv4 one."""
    if not isinstance(ip, IPv6Address):
        return None
    if ip in _NAT64:
        return IPv4Address(int(ip) & 0xFFFFFFFF)
    return ip.ipv4_mapped or ip.sixtofour


def _ip_of(host: str) -> IPAddress | None:
    if "%" in host:  # the name of a network interface
        return None
    try:
        return plain_ip(ipaddress.ip_address(host.removeprefix("[").removesuffix("]")))
    except ValueError:
        return None


def _plain_host(host: str | None) -> str | None:
    """``host`` as rules and addresses are compared; None if it is neither a name nor an IP
    address."""
    if host is None:
        return None
    host = host.removesuffix(".").lower()
    if (ip := _ip_of(host)) is not None:
        return str(ip)
    return host if len(host) <= 253 and _NAME.fullmatch(host) else None


def _in_ascii(name: str) -> str | None:
    """An international name as it is in addresses; None if it cannot be."""
    if name.isascii():
        return name
    try:
        return httpx.URL(scheme="http", host=name).raw_host.decode("ascii")
    except _NO_URL:
        return None


def _too_long(size: int) -> AddressRefused:
    return AddressRefused(f"must have at most {LONGEST_URL:,} characters, encoded, not {size:,}")


def _mistake(given: str) -> ConfigError:
    return ConfigError(
        f"image_hosts={given!r} must be a host such as images.example.com, *.example.com, "
        "images.example.com:8080 or 10.0.0.5:9000, without https:// and without a path"
    )
