//! Detects the type of a file from its first bytes.

/// The types that can be detected.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Png,
    Jpeg,
    Gif,
    Webp,
    Bmp,
    Tiff,
    Pdf,
    Zip,
    Gzip,
    Tar,
    Bzip2,
    Xz,
    Zstd,
    SevenZip,
    Rar,
    Elf,
    Exe,
}

impl Kind {
    pub(super) const fn media_type(self) -> &'static str {
        match self {
            Self::Png => "image/png",
            Self::Jpeg => "image/jpeg",
            Self::Gif => "image/gif",
            Self::Webp => "image/webp",
            Self::Bmp => "image/bmp",
            Self::Tiff => "image/tiff",
            Self::Pdf => "application/pdf",
            Self::Zip => "application/zip",
            Self::Gzip => "application/gzip",
            Self::Tar => "application/x-tar",
            Self::Bzip2 => "application/x-bzip2",
            Self::Xz => "application/x-xz",
            Self::Zstd => "application/zstd",
            Self::SevenZip => "application/x-7z-compressed",
            Self::Rar => "application/vnd.rar",
            Self::Elf => "application/x-executable",
            Self::Exe => "application/vnd.microsoft.portable-executable",
        }
    }

    pub(super) const fn is_image(self) -> bool {
        matches!(self, Self::Png | Self::Jpeg | Self::Gif | Self::Webp | Self::Bmp | Self::Tiff)
    }
}

/// Detects the type of content that starts with these bytes.
pub(super) fn sniff(head: &[u8]) -> Option<Kind> {
    let starts = |bytes: &[u8]| head.starts_with(bytes);
    let at = |offset: usize, bytes: &[u8]| {
        head.get(offset..).is_some_and(|rest| rest.starts_with(bytes))
    };
    let found = match () {
        () if starts(b"\x89PNG\r\n\x1a\n") => Kind::Png,
        () if starts(b"\xff\xd8\xff") => Kind::Jpeg,
        () if starts(b"GIF87a") || starts(b"GIF89a") => Kind::Gif,
        () if starts(b"RIFF") && at(8, b"WEBP") => Kind::Webp,
        () if starts(b"BM") && at(6, &[0; 4]) && at(14, b"\x28\0\0\0") => Kind::Bmp,
        () if starts(b"II*\0") || starts(b"MM\0*") => Kind::Tiff,
        () if starts(b"%PDF-") => Kind::Pdf,
        () if starts(b"PK\x03\x04") || starts(b"PK\x05\x06") => Kind::Zip,
        () if starts(b"\x1f\x8b\x08") => Kind::Gzip,
        () if at(257, b"ustar") => Kind::Tar,
        () if starts(b"BZh") && at(4, b"1AY&SY") => Kind::Bzip2,
        () if starts(b"\xfd7zXZ\0") => Kind::Xz,
        () if starts(b"\x28\xb5\x2f\xfd") => Kind::Zstd,
        () if starts(b"7z\xbc\xaf\x27\x1c") => Kind::SevenZip,
        () if starts(b"Rar!\x1a\x07") => Kind::Rar,
        () if starts(b"\x7fELF") => Kind::Elf,
        () if starts(b"MZ") && at(2, b"\x90\0\x03\0") => Kind::Exe,
        () => return None,
    };
    Some(found)
}

/// The type that the content of a declared media type must have, if it can be detected.
fn required_kind(media_type: &str) -> Option<Kind> {
    Some(match media_type {
        "image/png" => Kind::Png,
        "image/jpeg" | "image/jpg" => Kind::Jpeg,
        "image/gif" => Kind::Gif,
        "image/webp" => Kind::Webp,
        "application/pdf" => Kind::Pdf,
        "application/zip"
        | "application/x-zip-compressed"
        | "application/java-archive"
        | "application/epub+zip"
        | "application/vnd.android.package-archive" => Kind::Zip,
        "application/gzip" | "application/x-gzip" => Kind::Gzip,
        "application/x-bzip2" => Kind::Bzip2,
        "application/x-xz" => Kind::Xz,
        "application/zstd" => Kind::Zstd,
        "application/x-7z-compressed" => Kind::SevenZip,
        _ if media_type.starts_with("application/vnd.openxmlformats-officedocument.")
            || media_type.starts_with("application/vnd.oasis.opendocument.") =>
        {
            Kind::Zip
        }
        _ => return None,
    })
}

/// Whether a declared media type matches the detected type. A type without a known signature may
/// have any content; but detected content is never text, and a detected image matches only image
/// types.
pub(super) fn matches_declared(declared: &str, found: Option<Kind>) -> bool {
    if let Some(required) = required_kind(declared) {
        return found == Some(required);
    }
    let Some(found) = found else { return true };
    let is_text = declared.starts_with("text/")
        || ["application/json", "application/xml", "application/yaml", "image/svg+xml"]
            .contains(&declared);
    let kind =
        ["image/", "audio/", "video/", "font/"].into_iter().find(|kind| declared.starts_with(kind));
    !is_text && kind.is_none_or(|kind| found.media_type().starts_with(kind))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn declared_type_must_match_the_detected_one() {
        let png = Some(Kind::Png);
        for (declared, found, fine) in [
            ("image/png", png, true),
            ("image/png", None, false),
            ("image/png", Some(Kind::Jpeg), false),
            ("image/x-unknown", png, true),
            ("image/x-unknown", None, true),
            ("image/tiff", Some(Kind::Zip), false),
            ("text/plain", None, true),
            ("text/plain", png, false),
            ("application/json", Some(Kind::Gzip), false),
            ("application/octet-stream", png, true),
            ("application/x-something", Some(Kind::Zip), true),
            (
                "application/vnd.openxmlformats-officedocument.wordprocessingml.document",
                Some(Kind::Zip),
                true,
            ),
            (
                "application/vnd.openxmlformats-officedocument.wordprocessingml.document",
                None,
                false,
            ),
            ("", png, true),
            ("", None, true),
        ] {
            assert_eq!(matches_declared(declared, found), fine, "{declared}, {found:?}");
        }
    }

    #[test]
    fn types_are_detected_also_from_short_heads() {
        let mut tar = vec![0; 257];
        tar.extend(b"ustar\0");
        for (head, expected) in [
            (&b"\x89PNG\r\n\x1a\n"[..], Some(Kind::Png)),
            (b"RIFF\0\0\0\0WEBPVP8 ", Some(Kind::Webp)),
            (b"RIFF\0\0\0\0WAVE", None),
            (b"RIFF", None),
            (b"%PDF-1.7", Some(Kind::Pdf)),
            (b"PK\x05\x06", Some(Kind::Zip)),
            (&tar[..], Some(Kind::Tar)),
            (b"BMW is a car", None),
            (b"", None),
        ] {
            assert_eq!(sniff(head), expected, "{head:?}");
        }
    }
}
