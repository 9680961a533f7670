//! Files in UTF-16, which look like binary ones.

use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::FileExt;

use encoding_rs_io::DecodeReaderBytesBuilder;

/// Whether text begins with the byte order mark of UTF-16. That of UTF-32 begins with the same
/// bytes.
pub(super) fn is_utf16(start: &[u8]) -> bool {
    match start {
        [0xff, 0xfe, 0, 0, ..] => false,
        [0xff, 0xfe, ..] | [0xfe, 0xff, ..] => true,
        _ => false,
    }
}

/// The text of a file from its beginning, and whether it had to be decoded. Everything but UTF-16
/// is passed on as it is.
pub(super) fn reader(file: File) -> io::Result<(Box<dyn Read>, bool)> {
    let mut start = [0; 4];
    let read = file.read_at(&mut start, 0)?;
    if !is_utf16(&start[..read]) {
        return Ok((Box::new(file), false));
    }
    Ok((Box::new(DecodeReaderBytesBuilder::new().strip_bom(true).build(file)), true))
}
