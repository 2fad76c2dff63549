//! Files and folders with a job's data, in a place of the user's choice: for this user alone.
//!
//! Other users may write in a file's folder, such as `/tmp`, and may have put a link, a pipe or a
//! file of theirs in its place. No function here follows a link in a file's own name, and each
//! opened file is checked before it is read or written.

use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{self, Error, ErrorKind, Read};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::Path;

use rustix::fs::OFlags;
use rustix::process::geteuid;

/// Does not follow a link, and does not wait for the other end of a pipe.
fn options() -> OpenOptions {
    let mut options = OpenOptions::new();
    options.mode(0o600).custom_flags((OFlags::NOFOLLOW | OFlags::NONBLOCK).bits() as i32);
    options
}

fn refused(reason: String) -> Error {
    Error::new(ErrorKind::PermissionDenied, reason)
}

/// The file, if it is a regular one of this user's under one name.
fn checked(file: File) -> io::Result<File> {
    let metadata = file.metadata()?;
    let (owner, user) = (metadata.uid(), geteuid().as_raw());
    if !metadata.is_file() {
        return Err(refused(
            "something is there that is no file; remove it, or name another path".to_owned(),
        ));
    }
    if owner != user {
        return Err(refused(format!(
            "the file there is user {owner}'s, and this process runs as user {user}; remove it, or name another path"
        )));
    }
    if metadata.nlink() > 1 {
        return Err(refused(
            "the file there has other names, too; remove it, or name another path".to_owned(),
        ));
    }
    Ok(file)
}

fn opened(options: &OpenOptions, path: &Path) -> io::Result<File> {
    options.open(path).map_err(|error| match rustix::io::Errno::from_io_error(&error) {
        Some(rustix::io::Errno::LOOP) => {
            refused("a link is there, which is not followed; remove it, or name another path".to_owned())
        }
        _ => error,
    })
}

/// An empty file with mode 0600, or an emptied one of this user's.
///
/// # Errors
/// Where a link, a file of another user's or no file at all is in its place.
pub fn create(path: &Path) -> io::Result<File> {
    let file = checked(opened(options().write(true).create(true), path)?)?;
    // A file from before may have been open to others.
    file.set_permissions(std::fs::Permissions::from_mode(0o600))?;
    file.set_len(0)?;
    Ok(file)
}

/// A file of this user with mode 0600, created if missing, with its content kept.
pub fn open_or_create(path: &Path) -> io::Result<File> {
    checked(opened(options().append(true).create(true), path)?)
}

/// The contents of a file of this user's.
pub fn read(path: &Path) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    checked(opened(options().read(true), path)?)?.read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Makes a folder and those above it that are missing, for this user alone.
///
/// # Errors
/// Where the folder is another user's (root's may be used), or where all users may replace what is
/// in it.
pub fn create_folder(path: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(path)?;
    let folder = OpenOptions::new().read(true).custom_flags(OFlags::DIRECTORY.bits() as i32).open(path)?;
    let metadata = folder.metadata()?;
    let (owner, user, mode) = (metadata.uid(), geteuid().as_raw(), metadata.mode() & 0o7777);
    if owner != user && owner != 0 {
        return Err(refused(format!(
            "the folder is user {owner}'s, and this process runs as user {user}; name one of your own, or one that \
             does not exist yet"
        )));
    }
    // With the sticky bit others may add files, and not replace ours.
    if mode & 0o1002 == 0o002 {
        return Err(refused(format!(
            "all users may replace files in the folder (mode {mode:04o}); `chmod o-w` it, or name one that does not \
             exist yet"
        )));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;
    use std::os::unix::fs::symlink;

    use super::*;

    fn mode(path: &Path) -> u32 {
        std::fs::symlink_metadata(path).unwrap().permissions().mode() & 0o7777
    }

    fn write(path: &Path) -> io::Result<()> {
        create(path)?.write_all(b"new")
    }

    #[test]
    fn no_link_is_followed_and_no_file_of_others_is_written() {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        let victim = at("victim");
        std::fs::write(&victim, "old").unwrap();
        symlink(&victim, at("link")).unwrap();
        symlink(at("nowhere"), at("dangling")).unwrap();
        std::fs::hard_link(&victim, at("hard")).unwrap();
        let pipe = (rustix::fs::CWD, at("pipe"));
        rustix::fs::mknodat(
            pipe.0,
            &pipe.1,
            rustix::fs::FileType::Fifo,
            rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR,
            0,
        )
        .unwrap();
        std::fs::create_dir(at("folder")).unwrap();
        for (name, reason) in [("link", "a link is there"), ("dangling", "a link"), ("hard", "other names")] {
            let error = write(&at(name)).unwrap_err().to_string();
            assert!(error.contains(reason) && error.contains("name another path"), "{name}: {error}");
            assert!(open_or_create(&at(name)).is_err() && read(&at(name)).is_err(), "{name}");
        }
        for name in ["pipe", "folder"] {
            assert!(write(&at(name)).is_err() && open_or_create(&at(name)).is_err(), "{name}");
        }
        assert!(read(&at("pipe")).unwrap_err().to_string().contains("no file"));
        assert_eq!(std::fs::read(&victim).unwrap(), b"old");
        assert!(!at("nowhere").exists());
        if geteuid().is_root() {
            std::fs::write(at("theirs"), "old").unwrap();
            std::os::unix::fs::chown(at("theirs"), Some(65534), None).unwrap();
            let error = write(&at("theirs")).unwrap_err().to_string();
            assert!(error.contains("user 65534's"), "{error}");
            assert!(open_or_create(&at("theirs")).is_err() && read(&at("theirs")).is_err());
            assert_eq!(std::fs::read(at("theirs")).unwrap(), b"old");
        } else {
            eprintln!("not root: a file of another user is not tried");
        }
    }

    #[test]
    fn files_are_for_this_user_alone_also_those_that_were_there() {
        let directory = tempfile::tempdir().unwrap();
        let (new, old) = (directory.path().join("new"), directory.path().join("old"));
        std::fs::write(&old, "much older content").unwrap();
        std::fs::set_permissions(&old, std::fs::Permissions::from_mode(0o644)).unwrap();
        for path in [&new, &old] {
            write(path).unwrap();
            assert_eq!((mode(path), read(path).unwrap().as_slice()), (0o600, b"new".as_slice()));
        }
        open_or_create(&new).unwrap().write_all(b"er").unwrap();
        assert_eq!(read(&new).unwrap(), b"newer");
    }

    #[test]
    fn folders_of_other_users_and_open_ones_are_refused() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("a/b");
        create_folder(&path).unwrap();
        create_folder(&path).unwrap();
        assert_eq!((mode(&path), mode(&directory.path().join("a"))), (0o700, 0o700));
        let chmod = |mode| std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
        chmod(0o777);
        assert!(create_folder(&path).unwrap_err().to_string().contains("chmod o-w"));
        chmod(0o1777);
        create_folder(&path).unwrap();
        if geteuid().is_root() {
            std::os::unix::fs::chown(&path, Some(65534), None).unwrap();
            let error = create_folder(&path).unwrap_err().to_string();
            assert!(error.contains("user 65534's") && error.contains("name one of your own"), "{error}");
        } else {
            eprintln!("not root: a folder of another user is not tried");
        }
    }
}
