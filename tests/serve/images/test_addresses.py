"""Which addresses images are fetched from."""

from __future__ import annotations

from ipaddress import ip_address

import pytest

from kvboost.errors import ConfigError
from kvboost.serve.images.addresses import AddressRefused, ImageHosts, RemoteUrl, is_public


@pytest.mark.parametrize(
    ("hosts", "url"),
    [
        ("images.example.com", "https://images.example.com/a.png?b=c"),
        ("images.example.com", "HTTP://Images.Example.COM/"),
        ("images.example.com", "https://images.example.com./"),
        ("images.example.com", "https://images.example.com:443/"),
        ("images.example.com.", "https://images.example.com/"),
        ("*.example.com", "https://a.example.com/"),
        ("*.example.com", "https://a.b.example.com/"),
        ("*.Example.com:8080", "http://a.example.com:8080/"),
        ("bücher.example", "https://xn--bcher-kva.example/"),
        ("xn--bcher-kva.example", "https://bücher.example/"),
        ("10.0.0.5:9000", "http://10.0.0.5:9000/"),
        ("10.0.0.5", "http://[::ffff:10.0.0.5]/"),
        ("::1", "http://[0:0:0:0:0:0:0:1]/"),
        ("[2001:db8::1]:81", "http://[2001:db8::1]:81/"),
    ],
)
def test_an_allowed_host_may_be_written_in_any_form(hosts: str, url: str) -> None:
    assert ImageHosts([hosts]).problem(url) is None


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("https://evil.example/", "must be on a host"),
        ("https://example.com/", "must be on a host"),
        ("https://images.example.com.evil.example/", "must be on a host"),
        ("https://evilimages.example.com/", "must be on a host"),
        ("https://a.images.example.com/", "must be on a host"),
        ("https://b.org/", "must be on a host"),
        ("https://ab.org/", "must be on a host"),
        ("https://images.example.com:8443/", "must be on a host"),
        ("http://images.example.com:443/", "must be on a host"),
        ("https://ported.example/", "must be on a host"),
        ("https://images.example.com@evil.example/", "no user name"),
        ("https://user:secret@images.example.com/", "no user name"),
        ("https://evil.example\\@images.example.com/", "no user name"),
        ("https://evil.example#@images.example.com/", "must be on a host"),
        ("https://evil.example?.images.example.com/", "must be on a host"),
        ("https://images.example.com%2eevil.example/", "must be a valid address"),
        ("https://images.example.com%00.evil.example/", "must be a valid address"),
        ("https://images%2eexample.com/", "must be a valid address"),
        ("https://images.example.com\n.evil.example/", "must be a valid address"),
        ("https://images.example.com:0/", "must be a valid address"),
        ("https://images.example.com:99999/", "must be a valid address"),
        ("https://images.example.com../", "must be a valid address"),
        ("https:///images.example.com/", "must be a valid address"),
        ("https://[fe80::1%25eth0]/", "must be a valid address"),
        ("//images.example.com/a.png", "must begin with https://"),
        ("ftp://images.example.com/a.png", "must begin with https://"),
        ("file:///etc/passwd", "must begin with https://"),
        ("gopher://images.example.com/", "must begin with https://"),
        ("/etc/passwd", "must begin with https://"),
        ("", "must begin with https://"),
        ("http://169.254.169.254/latest/meta-data", "must be on a host"),
        ("http://2130706433/", "must be a valid address"),
        ("http://0x7f000001/", "must be a valid address"),
        ("http://127.1/", "must be a valid address"),
        ("http://0177.0.0.1/", "must be a valid address"),
        ("http://１２７.0.0.1/", "must be a valid address"),
        ("https://images.example.com/" + "a" * 9000, "at most 8,192 characters"),
        (
            "https://images.example.com/" + "\U0001f600" * 8000,
            "8,192 characters, encoded, not 96,0",
        ),
        ("https://images.example.com/\ud800", "must be a valid address"),
    ],
)
def test_all_other_addresses_are_refused(url: str, said: str) -> None:
    hosts = ImageHosts(["images.example.com", "*.b.org", "ported.example:8443", "127.0.0.1"])
    assert said in (hosts.problem(url) or "it is allowed")


@pytest.mark.parametrize(
    "given",
    [
        *("*", "*.", "", "https://a.example", "a.example/x", "u@a.example", "*.10.0.0.1", "a b"),
        *("a:0", "a:99999", "a:b", ":80", "10.0.0.0/8", "*.*.com", "a.*.com", "fe80::1%eth0"),
        *("0.0.0.0", "::", "224.0.0.1", "ff02::1", "-a.example", "127.1", "a..b"),
    ],
)
def test_an_operators_mistake_says_what_is_expected(given: str) -> None:
    with pytest.raises(ConfigError, match=r"must be a host such as images\.example\.com"):
        ImageHosts([given])


@pytest.mark.parametrize(
    "ip",
    [
        *("127.0.0.1", "127.255.255.254", "0.0.0.0", "10.0.0.1", "172.16.0.1", "192.168.1.1"),
        *("169.254.169.254", "169.254.170.2", "100.64.0.1", "100.100.100.200", "192.0.0.192"),
        *("168.63.129.16", "198.18.0.1", "192.0.2.1", "240.0.0.1", "255.255.255.255"),
        *("::", "::1", "fe80::1", "fec0::1", "fc00::1", "fd00:ec2::254", "ff02::1", "224.0.0.1"),
        *("::ffff:127.0.0.1", "::ffff:169.254.169.254", "::127.0.0.1", "2001:db8::1"),
        *("64:ff9b::169.254.169.254", "64:ff9b:1::10.0.0.1", "2002:7f00:1::"),
        *("2002:a9fe:a9fe::1", "2001::1", "1000::1"),
    ],
)
def test_machines_that_are_not_on_the_internet_are_known(ip: str) -> None:
    assert not is_public(ip_address(ip))


@pytest.mark.parametrize(
    "ip", ["1.1.1.1", "::ffff:1.1.1.1", "2606:4700::1111", "64:ff9b::1.1.1.1", "2002:101:101::1"]
)
def test_machines_on_the_internet_are_known(ip: str) -> None:
    assert is_public(ip_address(ip))


def test_a_private_address_must_be_allowed_itself() -> None:
    """Whoever owns a name decides what it means."""
    inside = ip_address("10.0.0.5")
    url = RemoteUrl.of("http://store.example:9000/a.png")
    named = ImageHosts(["store.example:9000", "*.example:9000"])
    assert not named.may_connect(url, inside)
    assert named.may_connect(url, ip_address("1.1.1.1"))
    both = ImageHosts(["store.example:9000", "10.0.0.5:9000"])
    assert both.may_connect(url, inside)
    assert both.may_connect(url, ip_address("::ffff:10.0.0.5"))
    assert not both.may_connect(url, ip_address("10.0.0.6"))
    assert not ImageHosts(["store.example:9000", "10.0.0.5"]).may_connect(url, inside)


@pytest.mark.parametrize(
    ("location", "expected"),
    [
        ("b.png", "https://a.example:8443/x/b.png"),
        ("/b.png", "https://a.example:8443/b.png"),
        ("?c", "https://a.example:8443/x/a.png?c"),
        ("//b.example/", "https://b.example/"),
        ("https://B.example#part", "https://b.example/"),
    ],
)
def test_redirects_are_relative_to_the_address_before_them(location: str, expected: str) -> None:
    assert RemoteUrl.of("https://a.example:8443/x/a.png").redirected(location) == RemoteUrl.of(
        expected
    )


@pytest.mark.parametrize(
    "location",
    ["http://a.example/", "file:///etc/passwd", "http://[", "//u@b/", "https:////{[-@@."],
)
def test_redirects_to_what_is_no_safe_address_are_refused(location: str) -> None:
    with pytest.raises(AddressRefused):
        RemoteUrl.of("https://a.example/").redirected(location)
