# package.mk - installing, and what is given away: included by the Makefile.
#
#   make install [DESTDIR=] [prefix=/usr/local]     the program, its manual, completions, a systemd unit, a model
#   make uninstall                                  takes the same files away
#   make deb                                        $(BUILD)/hadal_VERSION_ARCH.deb, for the Debian it was built on
#   make dist                                       $(BUILD)/hadal-VERSION.tar.gz, the last commit's sources
#
# Manual pages and completions are written by the program itself, from its tables of options.

prefix     ?= /usr/local
bindir     ?= $(prefix)/bin
datadir    ?= $(prefix)/share
sysconfdir ?= $(if $(filter /usr,$(prefix)),/etc,$(prefix)/etc)
mandir     ?= $(datadir)/man
unitdir    ?= $(prefix)/lib/systemd/system

MODEL    := models/tiny-v4
PAGES     = $(shell $(BUILD)/hadal --help | sed -n 's/^  \([a-z]*\) .*/\1/p')
INSTALLED = $(bindir)/hadal $(unitdir)/hadal.service $(mandir)/man1/hadal.1 $(mandir)/man1/hadal-*.1 \
            $(datadir)/bash-completion/completions/hadal $(datadir)/zsh/site-functions/_hadal \
            $(datadir)/fish/vendor_completions.d/hadal.fish $(datadir)/doc/hadal $(datadir)/hadal

.PHONY: install uninstall deb dist
install: $(BUILD)/hadal
	install -d $(addprefix $(DESTDIR),$(bindir) $(unitdir) $(mandir)/man1 $(sysconfdir)/default \
	  $(datadir)/bash-completion/completions $(datadir)/zsh/site-functions \
	  $(datadir)/fish/vendor_completions.d $(datadir)/doc/hadal/docs $(datadir)/hadal/$(MODEL)/eval)
	install -s -m 755 $(BUILD)/hadal $(DESTDIR)$(bindir)/hadal
	$(BUILD)/hadal manual >$(DESTDIR)$(mandir)/man1/hadal.1
	set -e; for page in $(PAGES); do \
	  $(BUILD)/hadal manual $$page >$(DESTDIR)$(mandir)/man1/hadal-$$page.1; done
	$(BUILD)/hadal completions bash >$(DESTDIR)$(datadir)/bash-completion/completions/hadal
	$(BUILD)/hadal completions zsh >$(DESTDIR)$(datadir)/zsh/site-functions/_hadal
	$(BUILD)/hadal completions fish >$(DESTDIR)$(datadir)/fish/vendor_completions.d/hadal.fish
	sed 's|@bindir@|$(bindir)|; s|@sysconfdir@|$(sysconfdir)|' packaging/hadal.service \
	  >$(DESTDIR)$(unitdir)/hadal.service
	[ -e $(DESTDIR)$(sysconfdir)/default/hadal ] || sed 's|@datadir@|$(datadir)|' packaging/default \
	  | install -m 640 /dev/stdin $(DESTDIR)$(sysconfdir)/default/hadal
	install -m 644 README.md CHANGELOG.md LICENSE $(DESTDIR)$(datadir)/doc/hadal
	install -m 644 docs/*.md $(DESTDIR)$(datadir)/doc/hadal/docs
	install -m 644 $(MODEL)/*.json $(MODEL)/*.safetensors $(MODEL)/README.md \
	  $(DESTDIR)$(datadir)/hadal/$(MODEL)
	install -m 644 $(MODEL)/eval/* $(DESTDIR)$(datadir)/hadal/$(MODEL)/eval

# What was set by hand, sysconfdir/default/hadal, stays.
uninstall:
	rm -rf $(addprefix $(DESTDIR),$(INSTALLED))

deb: $(BUILD)/hadal
	packaging/make_deb $(BUILD) $(VERSION)

dist:
	@mkdir -p $(BUILD)
	git archive --format=tar --prefix=hadal-$(VERSION)/ HEAD | gzip -9n >$(BUILD)/hadal-$(VERSION).tar.gz
