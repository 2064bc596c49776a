use proptest::prelude::*;

use super::*;

fn paths(configured: &[&str]) -> PublicPaths {
    PublicPaths::new(configured).expect("valid paths")
}

#[test]
fn an_exact_path_is_public_with_any_query_and_no_other_path_is() {
    let public = paths(&["/health", "/v1/docs/"]);
    for path in ["/health", "/health?", "/health?a=/../admin", "/health?x#y", "/v1/docs/"] {
        assert!(public.contains(path.as_bytes()), "{path}");
    }
    for path in ["/", "", "/healt", "/healthz", "/health/", "/health/x", "/HEALTH", "/v1/docs", "/x/health", "health"] {
        assert!(!public.contains(path.as_bytes()), "{path}");
    }
}

#[test]
fn a_trailing_star_makes_a_prefix() {
    let public = paths(&["/static/*", "/a*"]);
    for path in ["/static/", "/static/x", "/static/x/y.css?v=1", "/a", "/abc", "/a/b"] {
        assert!(public.contains(path.as_bytes()), "{path}");
    }
    for path in ["/static", "/statics/x", "/b", "/", "/Static/x"] {
        assert!(!public.contains(path.as_bytes()), "{path}");
    }
}

#[test]
fn a_star_alone_makes_every_plain_path_public() {
    let public = paths(&["*"]);
    assert!(public.contains(b"/"));
    assert!(public.contains(b"/anything/at/all?x"));
    assert!(!public.contains(b"/a/../b"));
    assert!(!public.contains(b"*"));
}

#[test]
fn spellings_that_mean_the_same_path_are_the_same_path() {
    let public = paths(&["/health", "/caf%c3%a9", "/%7euser/*"]);
    for path in ["/%68ealth", "/h%65%61lth", "/caf%C3%A9", "/caf%c3%A9", "/~user/x", "/%7Euser/%41"] {
        assert!(public.contains(path.as_bytes()), "{path}");
    }
    assert!(!public.contains("/café".as_bytes()), "bytes that should have been escaped");
}

#[test]
fn a_path_that_some_upstream_may_read_as_another_is_never_public() {
    let public = paths(&["*", "/health", "/health/*"]);
    let ambiguous: &[&[u8]] = &[
        b"/health/../admin",
        b"/health/..",
        b"/health/.",
        b"/health/./x",
        b"/health/%2e%2e/admin",
        b"/health/.%2E/admin",
        b"/health/%2e/x",
        b"/health/.../x",
        b"/health/..%20/admin",
        b"//health",
        b"/health//",
        b"//",
        b"/health/..;/admin",
        b"/health;x=1",
        b"/health;",
        b"/health/..%3b/admin",
        b"/health/..%2fadmin",
        b"/health%2Fx",
        b"/health/..%5cadmin",
        b"/health/..\\admin",
        b"/health/%252e%252e/admin",
        b"/health%25",
        b"/health%00",
        b"/health%0a",
        b"/health%7f",
        b"/health%C2%85",
        b"/health\0",
        b"/health\t",
        b"/health x",
        b"/health#",
        b"/health#/../admin",
        b"/health%23x",
        b"/health%3fx",
        b"/health%",
        b"/health%4",
        b"/health%zz",
        b"/health%+1",
        b"/health%u002e",
        b"/health/%c0%ae%c0%ae/admin",
        b"/health/%e0%80%af",
        b"/health/\xc0\xae",
        b"/health/\xff",
        b"/health/{x}",
        b"http://host/health",
        b"https://host/health",
        b"host:443",
        b"*",
        b"?/health",
        b"",
    ];
    for path in ambiguous {
        assert!(!public.contains(path), "{}", path.escape_ascii());
    }
}

#[test]
fn names_that_merely_hold_dots_are_plain() {
    let public = paths(&["/.well-known/*", "/v1.0/*"]);
    for path in ["/.well-known/a..b", "/.well-known/..a", "/.well-known/%2e%2ea", "/v1.0/...x", "/v1.0/a%20b."] {
        assert!(public.contains(path.as_bytes()), "{path}");
    }
}

#[test]
fn nothing_is_public_unless_configured() {
    assert!(!PublicPaths::default().contains(b"/health"));
}

#[test]
fn a_configured_path_that_could_never_match_is_refused() {
    for path in
        ["", "health", "/a?b", "/a#b", "//a", "/a/../b", "/a;b", "/a%2fb", "/a%", "/a b", "/é", "/..*", "health*"]
    {
        let refused = path.parse::<PublicPath>();
        assert_eq!(refused, Err(PublicPathError { path: path.to_owned() }), "{path}");
    }
    let error = PublicPaths::new(["/ok", "/a?b"]).expect_err("a query");
    assert_eq!(error.to_string(), "public path `/a?b` is not an absolute path that every upstream reads the same way");
}

#[test]
fn many_prefixes_are_found_in_any_order_also_inside_each_other() {
    let public = paths(&["/b/c/*", "/b/*", "/a/*", "/b/c/d*", "/c-/*", "/c/*", "/b/*", "/a/b/c/*"]);
    assert_eq!(public.prefixes, ["/a/", "/b/", "/c-/", "/c/"]);
    for path in ["/a/x", "/b/x", "/b/c/x", "/b/c/dx", "/c/x", "/c-/x", "/a/b/c/d"] {
        assert!(public.contains(path.as_bytes()), "{path}");
    }
    for path in ["/", "/a", "/bb/x", "/c-x", "/d/x"] {
        assert!(!public.contains(path.as_bytes()), "{path}");
    }
}

/// One way in which an upstream may make sense of a path.
#[derive(Debug, Clone, Copy)]
#[expect(clippy::struct_excessive_bools, reason = "each is a habit of its own, and all combinations are tried")]
struct Resolver {
    decodes: usize,
    backslash_is_slash: bool,
    strips_params: bool,
    resolves_before_decoding: bool,
    ignores_trailing_spaces: bool,
}

impl Resolver {
    fn all() -> impl Iterator<Item = Self> {
        (0..3).flat_map(|decodes| {
            (0..16).map(move |bits| Self {
                decodes,
                backslash_is_slash: bits & 1 != 0,
                strips_params: bits & 2 != 0,
                resolves_before_decoding: bits & 4 != 0,
                ignores_trailing_spaces: bits & 8 != 0,
            })
        })
    }

    fn resolve(self, target: &[u8]) -> Vec<u8> {
        let mut path = target.to_vec();
        for end in [b'?', b'#'] {
            path.truncate(path.iter().position(|byte| *byte == end).unwrap_or(path.len()));
        }
        if self.resolves_before_decoding {
            path = self.resolve_dots(&path);
        }
        for _ in 0..self.decodes {
            path = decode_leniently(&path);
            path.truncate(path.iter().position(|byte| matches!(byte, 0 | b'?' | b'#')).unwrap_or(path.len()));
        }
        self.resolve_dots(&path)
    }

    fn resolve_dots(self, path: &[u8]) -> Vec<u8> {
        let is_slash = |byte: &u8| *byte == b'/' || self.backslash_is_slash && *byte == b'\\';
        let mut resolved: Vec<&[u8]> = Vec::new();
        let mut ends_open = true;
        for segment in path.split(is_slash) {
            let mut segment = segment;
            if self.strips_params {
                segment = segment.split(|byte| *byte == b';').next().unwrap_or_default();
            }
            let trimmed = segment.trim_ascii_end();
            let dots = if self.ignores_trailing_spaces { trimmed } else { segment };
            ends_open = matches!(dots, b"" | b"." | b"..");
            match dots {
                b"" | b"." => {}
                b".." => drop(resolved.pop()),
                _ => resolved.push(segment),
            }
        }
        let mut path = b"/".to_vec();
        path.extend(resolved.join(&b'/'));
        if ends_open && !resolved.is_empty() {
            path.push(b'/');
        }
        path
    }
}

/// Decodes every escape, leaves broken ones, and accepts overlong forms of ASCII characters.
fn decode_leniently(path: &[u8]) -> Vec<u8> {
    let bytes: Vec<u8> = percent_encoding::percent_decode(path).collect();
    let mut decoded = Vec::new();
    let mut rest = bytes.as_slice();
    while let [first, tail @ ..] = rest {
        match (first, tail) {
            (0xc0 | 0xc1, [next, tail @ ..]) => {
                decoded.push((first & 1) << 6 | next & 0x3f);
                rest = tail;
            }
            (0xe0, [0x80 | 0x81, next, tail @ ..]) => {
                decoded.push(next & 0x3f);
                rest = tail;
            }
            _ => {
                decoded.push(*first);
                rest = tail;
            }
        }
    }
    decoded
}

/// A step upwards, spelt so that only some upstreams see it: dots, something that may be cut off, and a separator.
fn hostile_step() -> impl Strategy<Value = String> {
    let dot = || prop::sample::select(vec![".", ".", ".", "%2e", "%252e", "%c0%ae"]);
    let cut_off =
        prop::sample::select(vec!["", "", "", ";", ";a", "%3b", "%253b", "%20", " ", "%00", "%23", "%3f", "#"]);
    let separator = prop::sample::select(vec!["/", "/", "", "%2f", "%252F", "\\", "%5c", "%255C", "%c0%af"]);
    (dot(), dot(), cut_off, separator).prop_map(|(first, second, end, next)| [first, second, end, next].concat())
}

/// A start that looks public, and what attackers may put behind it.
fn hostile_path() -> impl Strategy<Value = Vec<u8>> {
    let starts = vec!["/static/", "/static/", "/stat%69c/", "/health", "/h%65alth", "/pre", "/%c3%a9/", "/", ""];
    let tokens = vec!["/", "//", "/./", "admin", "/x", "x/", "%25", "%", "%e0%80%ae", "%C3%A9", "?", "*", "+", ":"];
    let piece = prop_oneof![
        6 => hostile_step().prop_map(String::into_bytes),
        3 => prop::sample::select(tokens).prop_map(|token| token.as_bytes().to_vec()),
        1 => any::<u8>().prop_map(|byte| vec![byte]),
        1 => any::<u8>().prop_map(|byte| format!("%{byte:02x}").into_bytes()),
    ];
    (prop::sample::select(starts), prop::collection::vec(piece, 0..3))
        .prop_map(|(start, pieces)| [start.as_bytes().to_vec(), pieces.concat()].concat())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(10_000))]

    #[test]
    fn no_upstream_reads_a_public_path_as_one_outside_the_configured_set(path in hostile_path()) {
        let public = paths(&["/health", "/static/*", "/pre*", "/%C3%A9/*"]);
        if public.contains(&path) {
            for resolver in Resolver::all() {
                let read = resolver.resolve(&path);
                let read = if resolver.decodes == 0 { decode_leniently(&read) } else { read };
                let inside = read == b"/health"
                    || read.starts_with(b"/static/")
                    || read.starts_with(b"/pre")
                    || read.starts_with("/é/".as_bytes());
                prop_assert!(inside, "{} read as {} by {resolver:?}", path.escape_ascii(), read.escape_ascii());
            }
        }
    }
}

proptest! {
    #[test]
    fn any_bytes_can_be_asked_about(path: Vec<u8>) {
        let rooted = [b"/".as_slice(), &path].concat();
        for path in [&path, &rooted] {
            if let Some(normal) = normal(path) {
                let again = super::normal(normal.as_bytes());
                prop_assert_eq!(again.as_deref(), Some(&*normal), "the normal form is its own normal form");
            }
        }
    }

    #[test]
    fn the_sorted_search_agrees_with_trying_every_prefix(
        prefixes in prop::collection::vec("/[ab/-]{0,4}", 0..12),
        path in "/[ab/-]{0,6}",
    ) {
        let public: PublicPaths = prefixes.iter().cloned().map(PublicPath::Prefix).collect();
        prop_assert_eq!(public.has_prefix_of(&path), prefixes.iter().any(|prefix| path.starts_with(prefix.as_str())));
    }
}
